/** Opening images: dropped or chosen files, and entries of the list, with every run that is shown. */

import { Refused, drop, finished, json, post, upload } from "./api.js";
import { presets, zoomToMasks } from "./controls.js";
import { element, find, say } from "./dom.js";
import { fit } from "./panels.js";
import { depth, goTo, load, state, touch } from "./state.js";

/** @typedef {import("./types.js").Scene} Scene */
/** @typedef {import("./types.js").Summary} Summary */

/** @type {AbortController} */
let opening = new AbortController();

/** Options of the prediction that differ from the defaults. @returns {Record<string, string>} */
function options() {
  /** @type {Record<string, string>} */
  const found = {};
  for (const name of ["draws", "seed", "symmetries"]) {
    const field = /** @type {HTMLInputElement | HTMLSelectElement} */ (find(`#option-${name}`, HTMLElement));
    if (field.value && field.value !== field.dataset.usual) found[name] = field.value;
  }
  const [low, high] = [find("#option-low", HTMLInputElement).value, find("#option-high", HTMLInputElement).value];
  if (low && high) Object.assign(found, { assume_low: low, assume_high: high });
  if (find("#option-convert", HTMLInputElement).checked) found.convert = "true";
  return found;
}

/** @param {number} model the options with the number of masks as this model takes it */
function optionsOf(model) {
  const { draws, ...found } = options();
  if (draws) found[state.models[model]?.stratum ? "per_stratum" : "samples"] = draws;
  return { ...found, model: String(model) };
}

/** @param {number} share 0 … 1, or -1 where it is not known @param {string} text */
function progress(share, text) {
  const bar = find("#progress", HTMLProgressElement);
  bar.hidden = false;
  if (share < 0) bar.removeAttribute("value");
  else bar.value = share;
  find("#about", HTMLElement).textContent = text;
}

/**
 * @param {string} name
 * @param {(model: number, signal: AbortSignal) => Promise<{id: string}>} submit
 * @returns {Promise<boolean>} whether it is open now
 */
async function open(name, submit) {
  opening.abort();
  const mine = (opening = new AbortController());
  const { signal } = mine;
  find("#error", HTMLElement).hidden = true;
  document.body.classList.add("busy");
  progress(-1, `opening ${name} …`);
  /** @type {string[]} */
  const ids = [];
  try {
    const models = state.models.length ? state.models.map((model) => model.index) : [0];
    const jobs = await Promise.all(models.map((model) => submit(model, signal)));
    ids.push(...jobs.map((job) => job.id));
    const shares = models.map(() => 0);
    const waiting = jobs.map(({ id }, i) =>
      finished(id, (done, total, job) => {
        shares[i] = total ? done / total : 0;
        const all = shares.reduce((a, b) => a + b, 0) / shares.length;
        progress(total ? all : -1, `${name}: ${job === "waiting" ? "waiting" : "predicting"} …`);
      }, signal),
    );
    const summaries = await Promise.all(waiting);
    await show(summaries.map((summary, i) => sceneOf(jobs[i].id, models[i], summary)), signal);
    return true;
  } catch (error) {
    ids.forEach(drop);
    if (signal.aborted) return false;
    opening.abort();
    complain(error instanceof Error ? error.message : String(error));
    return false;
  } finally {
    if (mine === opening) {
      find("#progress", HTMLProgressElement).hidden = true;
      document.body.classList.remove("busy");
    }
  }
}

/** @param {string} id @param {number} model @param {Summary} summary @returns {Scene} */
function sceneOf(id, model, summary) {
  const label = state.models[model]?.name ?? summary.name;
  const colours = summary.colours ?? state.about.colours[model] ?? [];
  return { id, model, label, summary, colours, slices: new Map(), decisions: null, profile: null };
}

/** @param {Scene[]} scenes @param {AbortSignal} signal */
async function show(scenes, signal) {
  const first = scenes[0].summary;
  const slice = Math.floor((first.slices - 1) / 2);
  await Promise.all(scenes.map((scene) => load(scene, Math.min(slice, scene.summary.slices - 1))));
  if (signal.aborted) throw new Refused("another image was opened");
  const before = state.scenes;
  const alike = before.length && before[0].summary.units === first.units && first.name === before[0].summary.name;
  state.scenes = scenes;
  state.preview = null;
  state.pins = [];
  state.slice = slice;
  if (state.cls >= first.classes.length) state.cls = first.evaluated?.[0] ?? 1;
  const strata = scenes.some((scene) => scene.summary.strata);
  if (!before.length) state.contours.masks = !strata;
  for (const scene of before) drop(scene.id);
  if (!alike) {
    const [{ low, high }] = presets();
    state.window = { low, high };
    fit();
    const side = Math.max(...first.size);
    if (side > 200) zoomToMasks();
  }
  find("#panels", HTMLElement).classList.remove("empty");
  document.body.dataset.open = "yes";
  describe(scenes);
  touch("scenes", "slice", "list");
  if (depth() < 2) return;
  void goTo(slice);
  for (const scene of scenes)
    json(`/v1/predictions/${scene.id}/profile`, { signal })
      .then(({ expected }) => {
        scene.profile = expected;
        touch("profile");
      })
      .catch(() => {}); // another image was opened
}

/** @param {Scene[]} scenes */
function describe(scenes) {
  const { name, size, slices, notes, spacing, units } = scenes[0].summary;
  const form = `${slices > 1 ? `${slices} × ` : ""}${size[0]} × ${size[1]}`;
  const known = (spacing ?? []).slice(slices > 1 ? 0 : 1).filter((one) => one !== null);
  const apart = known.length ? `, ${known.map((one) => Number(one.toPrecision(3))).join(" × ")} mm` : "";
  find("#about", HTMLElement).replaceChildren(element("b", {}, name), ` ${form}${apart}${units ? `, ${units}` : ""}`);
  const place = find("#notes", HTMLElement);
  const all = [...new Set(scenes.flatMap((scene) => scene.summary.notes ?? notes))];
  place.hidden = !all.length;
  find("#notes summary", HTMLElement).textContent = all.length === 1 ? "1 warning" : `${all.length} warnings`;
  find("#notes ul", HTMLElement).replaceChildren(...all.map((note) => element("li", {}, note)));
  say(`${name} is open: ${scenes.map((scene) => `${scene.summary.masks.length} masks`).join(" and ")}`);
}

/** @param {string} message */
export function complain(message) {
  find("#error-text", HTMLElement).textContent = message.replace("convert=True", "the last option under Prediction");
  find("#error", HTMLElement).hidden = false;
  const scene = state.scenes[0];
  if (scene) describe(state.scenes);
  else find("#about", HTMLElement).textContent = "no image is open";
}

/** @param {File[]} files @param {string} [name] */
export async function openFiles(files, name = files.length > 1 ? `${files.length} files` : files[0]?.name) {
  if (!files.length) return;
  if (state.about.kind !== "models") {
    complain("without a run nothing can be predicted: start `ambiseg view RUN`");
    return;
  }
  const done = await open(name, (model, signal) => upload(files, optionsOf(model), signal));
  if (!done) return;
  state.files = files;
  state.entry = null;
  touch("list");
}

/** @param {number} index of the list */
export async function openEntry(index) {
  const entry = state.entries.find((one) => one.index === index);
  if (!entry) return;
  const body = (/** @type {number} */ model) => ({ ...optionsOf(model), model });
  const done = await open(entry.name, (model, signal) => post(`/v1/cases/${index}/open`, body(model), signal));
  if (!done) return;
  state.files = [];
  state.entry = index;
  touch("list");
}

/** Predict what is open again, with the options as they are now. */
export function again() {
  if (state.files.length) void openFiles(state.files);
  else if (state.entry !== null) void openEntry(state.entry);
}

/**
 * The files that were dropped, with those in dropped folders.
 * @param {DataTransfer} transfer
 * @returns {Promise<File[]>}
 */
async function dropped(transfer) {
  const entries = [...transfer.items].map((item) => item.webkitGetAsEntry?.()).filter((entry) => !!entry);
  if (!entries.some((entry) => entry.isDirectory)) return [...transfer.files];
  /** @type {File[]} */
  const found = [];
  /** @param {FileSystemEntry} entry */
  const walk = async (entry) => {
    if (entry.isFile) {
      const file = /** @type {FileSystemFileEntry} */ (entry);
      found.push(await new Promise((done, failed) => file.file(done, failed)));
      return;
    }
    const reader = /** @type {FileSystemDirectoryEntry} */ (entry).createReader();
    for (;;) {
      /** @type {FileSystemEntry[]} */
      const some = await new Promise((done, failed) => reader.readEntries(done, failed));
      if (!some.length) return;
      for (const one of some) await walk(one);
    }
  };
  for (const entry of entries) await walk(entry);
  return found.filter((file) => !file.name.startsWith("."));
}

export function start() {
  const input = find("#file", HTMLInputElement);
  const choose = () => input.click();
  for (const button of document.querySelectorAll(".choose")) button.addEventListener("click", choose);
  input.addEventListener("change", () => {
    const files = [...(input.files ?? [])];
    input.value = "";
    void openFiles(files);
  });
  find("#again", HTMLButtonElement).addEventListener("click", again);
  find("#error-close", HTMLButtonElement).addEventListener("click", () => {
    find("#error", HTMLElement).hidden = true;
  });
  let inside = 0;
  const carries = (/** @type {DragEvent} */ event) => !!event.dataTransfer?.types.includes("Files");
  addEventListener("dragenter", (event) => {
    if (carries(event)) document.body.classList.toggle("dropping", ++inside > 0);
  });
  addEventListener("dragleave", (event) => {
    if (carries(event)) document.body.classList.toggle("dropping", --inside > 0);
  });
  addEventListener("dragover", (event) => carries(event) && event.preventDefault());
  addEventListener("drop", (event) => {
    event.preventDefault();
    inside = 0;
    document.body.classList.remove("dropping");
    if (event.dataTransfer) void dropped(event.dataTransfer).then((files) => openFiles(files));
  });
}
