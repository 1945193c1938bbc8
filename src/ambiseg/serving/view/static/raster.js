/** From arrays to pixels: windows of raw values, heat colours, outlines of masks, maps computed from weighted masks. */

/** @typedef {import("./types.js").Slice} Slice */
/** @typedef {Uint8Array | Uint16Array} Labels */

/** @param {string} colour as #rrggbb @returns {[number, number, number]} */
export function rgb(colour) {
  const value = parseInt(colour.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}

/** @param {number} w @param {number} h */
export function canvasOf(w, h) {
  const canvas = document.createElement("canvas");
  canvas.width = w;
  canvas.height = h;
  return canvas;
}

/**
 * @param {HTMLCanvasElement} canvas
 * @returns {CanvasRenderingContext2D}
 */
export function context(canvas) {
  const found = canvas.getContext("2d");
  if (!found) throw new Error("expected a canvas that can be drawn on, found none");
  return found;
}

/**
 * What is computed from a slice once: kept until another value of `version` is asked for.
 * @template T
 * @param {Slice} slice
 * @param {string} name
 * @param {string} version
 * @param {() => T} make
 * @returns {T}
 */
export function once(slice, name, version, make) {
  const kept = slice.made.get(name);
  if (kept && kept.version === version) return kept.value;
  const value = make();
  slice.made.set(name, { version, value });
  return value;
}

/**
 * Raw values as a picture: `low` is black and `high` white. Three channels are colours, of others the first is shown.
 * @param {Slice} slice
 * @param {number} low
 * @param {number} high
 * @returns {HTMLCanvasElement}
 */
export function picture(slice, low, high) {
  return once(slice, "picture", `${low} ${high}`, () => {
    const { h, w, image, channels } = slice;
    const canvas = canvasOf(w, h);
    const pixels = new ImageData(w, h);
    const out = new Uint32Array(pixels.data.buffer);
    const scale = 255 / Math.max(high - low, 1e-12);
    const n = h * w;
    if (!image) out.fill(0xff303030);
    else if (channels === 3) {
      const bytes = pixels.data; // clamped
      for (let i = 0; i < n; i++) {
        bytes[4 * i] = (image[i] - low) * scale;
        bytes[4 * i + 1] = (image[n + i] - low) * scale;
        bytes[4 * i + 2] = (image[2 * n + i] - low) * scale;
        bytes[4 * i + 3] = 255;
      }
    } else
      for (let i = 0; i < n; i++) {
        const value = (image[i] - low) * scale;
        const grey = value <= 0 ? 0 : value >= 255 ? 255 : Math.round(value);
        out[i] = 0xff000000 | (grey << 16) | (grey << 8) | grey;
      }
    context(canvas).putImageData(pixels, 0, 0);
    return canvas;
  });
}

/**
 * 256 colours along the stops, transparent at 0 and opaque from a quarter on, so that the image stays visible.
 * @param {string[]} stops
 */
export function heatTable(stops) {
  const table = new Uint32Array(256);
  const colours = stops.map(rgb);
  for (let i = 0; i < 256; i++) {
    const at = (i / 255) * (stops.length - 1);
    const below = Math.min(Math.floor(at), stops.length - 2);
    const [r, g, b] = colours[below].map((part, c) => Math.round(part + (at - below) * (colours[below + 1][c] - part)));
    table[i] = ((Math.min(255, 4 * i) << 24) | (b << 16) | (g << 8) | r) >>> 0;
  }
  return table;
}

/**
 * @param {Uint8Array} values 0 … 255
 * @param {number} h
 * @param {number} w
 * @param {Uint32Array} table
 */
export function heat(values, h, w, table) {
  const canvas = canvasOf(w, h);
  const pixels = new ImageData(w, h);
  const out = new Uint32Array(pixels.data.buffer);
  for (let i = 0; i < out.length; i++) out[i] = table[values[i]];
  context(canvas).putImageData(pixels, 0, 0);
  return canvas;
}

/**
 * A map of class ids in the colours of the classes; class 0 is left transparent.
 * @param {Labels} labels
 * @param {number} h
 * @param {number} w
 * @param {string[]} colours
 */
export function filled(labels, h, w, colours) {
  const canvas = canvasOf(w, h);
  const pixels = new ImageData(w, h);
  const out = new Uint32Array(pixels.data.buffer);
  const table = colours.map((colour, i) => {
    const [r, g, b] = rgb(colour);
    return i ? (0xff000000 | (b << 16) | (g << 8) | r) >>> 0 : 0;
  });
  for (let i = 0; i < out.length; i++) out[i] = table[labels[i]] ?? 0;
  context(canvas).putImageData(pixels, 0, 0);
  return canvas;
}

/**
 * The probability that two masks drawn independently have different classes at a pixel, 255 at its largest value:
 *
 *     d = 1 − Σ_c (Σ_i weights[i] · [masks[i] = c])²,   at most 1 − 1 / C
 *
 * @param {Labels[]} masks
 * @param {number[]} weights any sum
 * @param {number} classes
 */
export function disagreement(masks, weights, classes) {
  const n = masks.length ? masks[0].length : 0;
  const total = weights.reduce((a, b) => a + b, 0) || 1;
  const shares = new Float32Array(n * classes);
  masks.forEach((labels, i) => {
    const share = weights[i] / total;
    for (let p = 0; p < n; p++) shares[p * classes + labels[p]] += share;
  });
  const out = new Uint8Array(n);
  const scale = 255 / (1 - 1 / classes);
  for (let p = 0; p < n; p++) {
    let same = 0;
    for (let c = 0; c < classes; c++) same += shares[p * classes + c] ** 2;
    out[p] = Math.max(0, Math.min(255, Math.round((1 - same) * scale)));
  }
  return out;
}

const [RIGHT, DOWN, LEFT, UP] = [1, 2, 4, 8];

/**
 * The outline of one class along the borders of its pixels, as the path data of an SVG; empty where there is none.
 * Pixels that touch at a corner only are apart.
 * @param {Labels} labels
 * @param {number} h
 * @param {number} w
 * @param {number} cls
 * @returns {string}
 */
export function outline(labels, h, w, cls) {
  const W = w + 1;
  const out = new Uint8Array(W * (h + 1)); // directions of the edges that start at a corner, the class to their right
  /** @type {number[]} */
  const starts = [];
  for (let y = 0, i = 0; y < h; y++)
    for (let x = 0; x < w; x++, i++) {
      if (labels[i] !== cls) continue;
      const corner = y * W + x;
      if (!y || labels[i - w] !== cls) {
        out[corner] |= RIGHT;
        starts.push(corner);
      }
      if (x === w - 1 || labels[i + 1] !== cls) out[corner + 1] |= DOWN;
      if (y === h - 1 || labels[i + w] !== cls) out[corner + W + 1] |= LEFT;
      if (!x || labels[i - 1] !== cls) out[corner + W] |= UP;
    }
  const parts = [];
  for (const start of starts) {
    if (!(out[start] & RIGHT)) continue;
    let at = start;
    let way = RIGHT;
    let length = 0;
    parts.push(`M${start % W} ${Math.floor(start / W)}`);
    do {
      out[at] &= ~way;
      at += way === RIGHT ? 1 : way === DOWN ? W : way === LEFT ? -1 : -W;
      length++;
      const turns = [(way << 1) & 15 || RIGHT, way, way >> 1 || UP]; // to the right, straight on, to the left
      const closed = at === start && way === UP; // the next turn to the right is where it began
      const next = closed ? 0 : (turns.find((turn) => out[at] & turn) ?? 0);
      if (next !== way) {
        parts.push(step(way, length));
        length = 0;
      }
      way = next;
    } while (way);
    parts.push("z");
  }
  return parts.join("");
}

/** @param {number} way @param {number} length */
function step(way, length) {
  const sign = way === RIGHT || way === DOWN ? 1 : -1;
  return `${way === RIGHT || way === LEFT ? "h" : "v"}${sign * length}`;
}

/**
 * The outline of a mask's class, computed once: as path data and as a path of the canvas, as tall as pixels are.
 * @param {Slice} slice
 * @param {{kind: string, index: number}} mark
 * @param {Labels | null} labels
 * @param {number} cls
 */
export function outlineOf(slice, mark, labels, cls) {
  return once(slice, `outline ${mark.kind} ${mark.index}`, `${cls}`, () => {
    const square = labels ? outline(labels, slice.h, slice.w, cls) : "";
    const d = slice.tall === 1 ? square : square.replace(/([ v])(-?\d+)/g, (_, before, y) => `${before}${+(y * slice.tall).toFixed(3)}`);
    return { d, path: new Path2D(d) };
  });
}

/**
 * The smallest box that holds every class but 0 of all masks: [x, y, width, height]; null where there is none.
 * @param {Labels[]} masks
 * @param {number} h
 * @param {number} w
 * @returns {[number, number, number, number] | null}
 */
export function boxOf(masks, h, w) {
  let [left, top, right, bottom] = [w, h, -1, -1];
  for (const labels of masks)
    for (let y = 0, i = 0; y < h; y++)
      for (let x = 0; x < w; x++, i++)
        if (labels[i]) {
          if (x < left) left = x;
          if (x > right) right = x;
          if (y < top) top = y;
          if (y > bottom) bottom = y;
        }
  return right < 0 ? null : [left, top, right - left + 1, bottom - top + 1];
}

/**
 * How many of the heaviest masks cover a share of the probability.
 * @param {number[]} weights in descending order
 * @param {number} share 0 … 1
 * @returns {{count: number, covered: number}}
 */
export function coverage(weights, share) {
  const total = weights.reduce((a, b) => a + b, 0) || 1;
  let [count, covered] = [0, 0];
  while (count < weights.length && covered < share - 1e-6) covered += weights[count++] / total;
  return { count, covered: Math.min(covered, 1) };
}
