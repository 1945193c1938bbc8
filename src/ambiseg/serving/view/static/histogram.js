/** How large the masks are, and how probable each size is; where the masks that are looked at are in it. */

import { element, find, shape } from "./dom.js";
import { colourOf, marksOf, nameOf, number, percent, state, watch } from "./state.js";

/** @typedef {import("./types.js").Summary} Summary */

const [WIDTH, HEIGHT, LEFT, BOTTOM, TOP] = [268, 116, 4, 32, 8];
const BINS = 14;

/**
 * What one pixel of a mask counts, and the unit of the sum: ml of volumes, mm² of images, else pixels.
 * @param {Summary} summary
 */
export function unitOf(summary) {
  const [dz, dy, dx] = summary.spacing ?? [];
  if (summary.slices > 1 && dz && dy && dx) return { factor: (dz * dy * dx) / 1000, unit: "ml", what: "Volume" };
  if (summary.slices === 1 && dy && dx) return { factor: dy * dx, unit: "mm²", what: "Area" };
  return { factor: 1, unit: summary.slices > 1 ? "voxels" : "pixels", what: summary.slices > 1 ? "Volume" : "Area" };
}

/** @param {Summary} summary @returns {{size: number, weight: number}[]} of the masks, in its unit */
export function sizesOf(summary) {
  const { factor } = unitOf(summary);
  const total = summary.masks.reduce((sum, mask) => sum + mask.weight, 0) || 1;
  return summary.masks.map((mask) => ({ size: (mask.pixels[state.cls] ?? 0) * factor, weight: mask.weight / total }));
}

/** The probability that a mask holds any of the class. @param {Summary} summary */
export function presence(summary) {
  return sizesOf(summary).reduce((sum, { size, weight }) => sum + (size > 0 ? weight : 0), 0);
}

/**
 * The smallest size that at least a share of the probability does not exceed.
 * @param {{size: number, weight: number}[]} sizes
 * @param {number} share
 */
export function quantile(sizes, share) {
  const sorted = [...sizes].sort((a, b) => a.size - b.size);
  let sum = 0;
  for (const { size, weight } of sorted) if ((sum += weight) >= share - 1e-6) return size;
  return sorted.at(-1)?.size ?? NaN;
}

/** @param {Omit<import("./types.js").Mark, "colour">} mark @returns {number | null} its size; of strata not known */
function sizeOf(mark) {
  const { summary, decisions } = state.scenes[mark.scene];
  const { factor } = unitOf(summary);
  const decided = {
    consensus: decisions?.consensus[mark.index]?.pixels[state.cls],
    kept: decisions?.kept.pixels[mark.index]?.[state.cls],
    bound: decisions?.bounds?.classes[mark.index >> 1]?.pixels[mark.index % 2],
  };
  if (mark.kind in decided) return (/** @type {Record<string, number | undefined>} */ (decided)[mark.kind] ?? 0) * factor;
  if (mark.kind === "mask") return (summary.masks[mark.index].pixels[state.cls] ?? 0) * factor;
  const told = mark.kind === "reader" ? summary.readers?.[mark.index]?.pixels[state.cls] : null;
  if (told !== null && told !== undefined) return told * factor;
  const slice = summary.slices === 1 ? state.scenes[mark.scene].slices.get(0) : null;
  const labels = slice?.centres[mark.index];
  if (!labels) return null;
  let pixels = 0;
  for (const label of labels) pixels += Number(label === state.cls);
  return pixels * factor;
}

/** @param {number} at */
function chart(at) {
  const { summary } = state.scenes[at];
  const sizes = sizesOf(summary);
  const { unit, what } = unitOf(summary);
  const readers = marksOf(0).filter((mark) => mark.kind === "reader");
  const all = state.scenes.flatMap((scene) => sizesOf(scene.summary).map(({ size }) => size));
  for (const mark of readers) all.push(sizeOf(mark) ?? 0);
  const most = Math.max(...all);
  const least = Math.min(...all);
  const room = most > least ? 0.04 * (most - least) : Math.max(1, 0.1 * most);
  const [low, high] = [Math.max(0, least - room), most + room];
  const x = (/** @type {number} */ size) => LEFT + ((size - low) / (high - low)) * (WIDTH - 2 * LEFT);
  const bins = new Float64Array(BINS);
  for (const { size, weight } of sizes) bins[Math.min(BINS - 1, Math.floor(((size - low) / (high - low)) * BINS))] += weight;
  const top = Math.max(...bins, 1e-9);
  const base = HEIGHT - BOTTOM;
  const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" });
  const told = `${what} of ${summary.classes[state.cls]}: median ${number(quantile(sizes, 0.5))} ${unit}`;
  svg.append(shape("title", {}, told));
  bins.forEach((share, i) => {
    const tall = (share / top) * (base - TOP);
    const wide = (WIDTH - 2 * LEFT) / BINS;
    svg.append(shape("rect", { x: LEFT + i * wide + 0.5, y: base - tall, width: wide - 1, height: tall, class: "bin" }));
  });
  svg.append(shape("line", { x1: LEFT, x2: WIDTH - LEFT, y1: base, y2: base, class: "axis" }));
  for (const mark of readers) {
    const size = sizeOf(mark);
    if (size === null) continue;
    const [px, py] = [x(size), base + 2];
    const point = `M${px} ${py}l4 7h-8z`;
    svg.append(shape("path", { d: point, fill: colourOf(mark), class: "reader" }, shape("title", {}, nameOf(mark).name)));
  }
  const marked = [...state.pins, ...(state.preview ? [{ ...state.preview, colour: "var(--ink)" }] : [])];
  for (const mark of marked) {
    const size = mark.scene === at || mark.kind === "reader" ? sizeOf(mark) : null;
    if (size === null) continue;
    const line = shape("line", { x1: x(size), x2: x(size), y1: TOP - 4, y2: base, stroke: mark.colour, class: "mark" });
    line.append(shape("title", {}, `${nameOf(mark).name}: ${number(size, 4)} ${unit}`));
    svg.append(line);
  }
  svg.append(shape("text", { x: LEFT, y: HEIGHT - 6, "text-anchor": "start" }, `${number(low)}`));
  svg.append(shape("text", { x: WIDTH / 2, y: HEIGHT - 6, "text-anchor": "middle" }, `${what.toLowerCase()}, ${unit}`));
  svg.append(shape("text", { x: WIDTH - LEFT, y: HEIGHT - 6, "text-anchor": "end" }, `${number(high)}`));
  return svg;
}

/** @param {number} at */
function facts(at) {
  const { summary } = state.scenes[at];
  const sizes = sizesOf(summary);
  const { factor, unit: whole } = unitOf(summary);
  const unit = factor === 1 ? "" : ` ${whole}`; // pixels are said under the axis
  const range = [0.05, 0.5, 0.95].map((share) => number(quantile(sizes, share)));
  const { preview, pins } = state;
  const mark = preview ?? pins.at(-1);
  const size = mark && (mark.scene === at || mark.kind === "reader") ? sizeOf(mark) : null;
  /** @type {[string, string][]} */
  const rows = [
    [summary.form === "readers" ? "Drawn by" : "Presence", percent(presence(summary))],
    ["Median (5–95 %)", `${range[1]} (${range[0]}–${range[2]})${unit}`],
    [mark && size !== null ? nameOf(mark).name : "Mask pointed at", mark && size !== null ? `${number(size, 4)} ${whole}` : "–"],
  ];
  return element("dl", {}, ...rows.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}

function build() {
  const place = find("#sizes", HTMLElement);
  const first = state.scenes[0];
  find("#sizes-title", HTMLElement).textContent = first ? `${unitOf(first.summary).what} and presence` : "Area and presence";
  if (!first) return;
  const parts = state.scenes.map((scene, at) => {
    const box = element("div", { className: "sizes" });
    if (state.scenes.length > 1) box.append(element("h3", {}, scene.label));
    box.append(chart(at), facts(at));
    return box;
  });
  place.replaceChildren(...parts);
}

export function start() {
  watch(["scenes", "class", "marks", "slice"], build);
}
