/** Requests to the server that the page came from, and the binary form of slices. */

/** @typedef {import("./types.js").Slice} Slice */
/** @typedef {import("./types.js").Summary} Summary */

const MAGIC = 0x31424d41; // "AMB1", little endian
const PAUSE = 120; // milliseconds between two questions about a job

/** What the server said is wrong, in one line. */
export class Refused extends Error {}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 */
async function ask(path, options) {
  let answer;
  try {
    answer = await fetch(path, { credentials: "same-origin", ...options });
  } catch (error) {
    if (error instanceof DOMException && error.name === "AbortError") throw error;
    throw new Refused("the server does not answer: is the command `ambiseg view` still running?");
  }
  if (answer.ok) return answer;
  let said = `${answer.status} ${answer.statusText}`;
  try {
    said = (await answer.json()).error ?? said;
  } catch {
    // no JSON: the status is all there is to say
  }
  throw new Refused(said);
}

/**
 * @param {string} path
 * @param {RequestInit} [options]
 * @returns {Promise<any>}
 */
export async function json(path, options) {
  return (await ask(path, options)).json();
}

/**
 * @param {string} path
 * @param {unknown} body
 * @param {AbortSignal} [signal]
 * @returns {Promise<any>}
 */
export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return json(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

/**
 * Send image files to be predicted; several are the slices of one DICOM series.
 * @param {File[]} files
 * @param {Record<string, string>} options
 * @param {AbortSignal} signal
 * @returns {Promise<{id: string}>}
 */
export function upload(files, options, signal) {
  const form = new FormData();
  for (const [name, value] of Object.entries(options)) form.append(name, value);
  for (const file of files) form.append("image", file, file.name);
  return json("/v1/predictions", { method: "POST", body: form, signal });
}

/**
 * Wait for a job to end.
 * @param {string} id
 * @param {(done: number, total: number, state: string) => void} progress
 * @param {AbortSignal} signal
 * @returns {Promise<Summary>}
 */
export async function finished(id, progress, signal) {
  for (;;) {
    const job = await json(`/v1/predictions/${id}`, { signal });
    if (job.state === "done") return job.prediction;
    if (job.state === "failed" || job.state === "cancelled") throw new Refused(job.error ?? "it was cancelled");
    progress(job.done ?? 0, job.total ?? 0, job.state);
    await new Promise((go) => setTimeout(go, PAUSE));
  }
}

/** @param {string} id of a result that is not needed any more */
export function drop(id) {
  fetch(`/v1/predictions/${id}`, { method: "DELETE", credentials: "same-origin", keepalive: true }).catch(() => {});
}

/** @param {string} path @returns {Promise<ArrayBuffer>} */
export async function raw(path) {
  return (await ask(path)).arrayBuffer();
}

/**
 * @param {string} id
 * @param {number} k
 * @returns {Promise<Slice>}
 */
export async function slice(id, k) {
  return decoded(await raw(`/v1/predictions/${id}/slices/${k}`));
}

const TYPES = { float32: Float32Array, uint8: Uint8Array, uint16: Uint16Array };

/**
 * The arrays of a slice: magic, length of the header, the header as JSON, then the arrays, each at a multiple of 8 bytes.
 * @param {ArrayBuffer} buffer
 * @returns {Slice}
 */
export function decoded(buffer) {
  const view = new DataView(buffer);
  if (view.getUint32(0, true) !== MAGIC) throw new Refused("a slice came in a form that this page does not know");
  const length = view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const [h, w] = header.size;
  /** @type {Record<string, any[]>} */
  const found = {};
  let channels = 1;
  let at = 8 + length;
  for (const { name, dtype, shape } of header.arrays) {
    const Type = TYPES[/** @type {keyof typeof TYPES} */ (dtype ?? "uint8")];
    const size = shape.reduce((/** @type {number} */ a, /** @type {number} */ b) => a * b, 1);
    const values = new Type(buffer, at, size);
    at += Math.ceil(values.byteLength / 8) * 8;
    if (name === "image") channels = shape.length === 3 ? shape[0] : 1;
    const parts = shape.length === 3 && name !== "image" ? shape[0] : 1;
    found[name] = Array.from({ length: parts }, (_, i) => values.subarray((i * size) / parts, ((i + 1) * size) / parts));
  }
  const { image = [null], masks = [], centres = [], readers = [], marginal = [], entropy = [null] } = found;
  const { consensus = [], kept = [], bounds = [] } = found;
  const labels = { masks, centres, readers, consensus, kept, bounds, keep: 0 };
  return { k: header.slice, h, w, tall: 1, channels, image: image[0], ...labels, marginal, entropy: entropy[0], made: new Map() };
}
