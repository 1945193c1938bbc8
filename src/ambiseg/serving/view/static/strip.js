/** The row of masks: of strata, drawn ones and annotations, with their probability; pointed at or focused to preview. */

import { element, find } from "./dom.js";
import { boxOf, context, coverage, filled, once, outlineOf, picture } from "./raster.js";
import { colourOf, labelsOf, marksOf, nameOf, percent, same, sliceOf, state, togglePin, touch, watch } from "./state.js";

/** @typedef {import("./types.js").Slice} Slice */
/** @typedef {Omit<import("./types.js").Mark, "colour">} Place */
/** @typedef {{mark: Place, button: HTMLButtonElement, canvas: HTMLCanvasElement}} Tile */

const SIDE = 84;
const MARGIN = 0.35; // of the masks' box, around it

/** @type {Tile[]} */
let tiles = [];

/**
 * The square part of a slice that thumbnails show: where its masks are, in widths of a pixel.
 * @param {Slice} slice
 */
export function focusOf(slice) {
  return once(slice, "focus", "", () => {
    const { w, tall } = slice;
    const box = boxOf([...slice.masks, ...slice.centres, ...slice.readers], slice.h, w);
    const h = slice.h * tall;
    if (!box) return { x: (w - Math.max(h, w)) / 2, y: (h - Math.max(h, w)) / 2, side: Math.max(h, w) };
    const [x, width] = [box[0], box[2]];
    const [y, height] = [box[1] * tall, box[3] * tall];
    const side = Math.min(Math.max(h, w), Math.max(16, Math.max(width, height) * (1 + 2 * MARGIN)));
    return { x: x + width / 2 - side / 2, y: y + height / 2 - side / 2, side };
  });
}

/** @param {Tile} tile */
function draw({ mark, canvas }) {
  const scene = state.scenes[mark.scene];
  const slice = scene && sliceOf(scene);
  const ratio = window.devicePixelRatio || 1;
  const side = Math.round(SIDE * ratio);
  if (canvas.width !== side) Object.assign(canvas, { width: side, height: side });
  const to = context(canvas);
  to.setTransform(1, 0, 0, 1, 0, 0);
  to.fillStyle = "#0d1117";
  to.fillRect(0, 0, side, side);
  const labels = slice && labelsOf(slice, mark);
  if (!slice || !labels) return;
  const focus = focusOf(slice);
  const scale = side / focus.side;
  to.setTransform(scale, 0, 0, scale, -focus.x * scale, -focus.y * scale);
  to.imageSmoothingEnabled = scale < 1;
  const h = slice.h * slice.tall;
  to.drawImage(picture(slice, state.window.low, state.window.high), 0, 0, slice.w, h);
  const { path } = outlineOf(slice, mark, labels, state.cls);
  to.globalAlpha = 0.3;
  if (scene.colours.length > 2) {
    const name = `filled ${mark.kind} ${mark.index}`;
    to.drawImage(once(slice, name, "", () => filled(labels, slice.h, slice.w, scene.colours)), 0, 0, slice.w, h);
  } else {
    to.fillStyle = scene.colours[state.cls] ?? "#ffffff";
    to.fill(path);
  }
  to.globalAlpha = 1;
  to.strokeStyle = "#000";
  to.lineWidth = (3.5 * ratio) / scale;
  to.stroke(path);
  to.strokeStyle = colourOf(mark);
  to.lineWidth = (2 * ratio) / scale;
  to.stroke(path);
}

/** @param {Place} mark */
function tileOf(mark) {
  const { name, weight } = nameOf(mark);
  const scene = state.scenes[mark.scene];
  const canvas = element("canvas", { width: SIDE, height: SIDE });
  canvas.setAttribute("aria-hidden", "true");
  const bar = element("span", { className: "bar" }, element("i", {}));
  const weights = { centre: scene.summary.strata?.weights, kept: scene.decisions?.kept.weights };
  const own = /** @type {Record<string, number[] | undefined>} */ (weights)[mark.kind];
  const top = Math.max(...(own ?? scene.summary.masks.map((one) => one.weight)));
  const fill = /** @type {HTMLElement} */ (bar.firstElementChild);
  fill.style.width = weight === null ? "0" : `${(100 * weight) / (top || 1)}%`;
  fill.style.background = colourOf(mark);
  const dashed = mark.kind === "reader" || mark.kind === "bound";
  const swatch = element("i", { className: dashed ? "swatch dashed" : "swatch" });
  swatch.style.borderColor = colourOf(mark);
  const label = element("span", { className: "name" }, swatch, element("span", { className: "text" }, name));
  const share = element("b", {}, weight === null ? "" : percent(weight));
  const button = element("button", { type: "button", className: "tile", title: `${name}: pointing at it shows it, pressing pins it` });
  button.append(canvas, label, share, bar);
  button.setAttribute("aria-label", `${name}${weight === null ? "" : `, probability ${percent(weight)}`}`);
  button.addEventListener("pointerenter", (event) => event.pointerType !== "touch" && preview(mark));
  button.addEventListener("pointerleave", () => preview(null));
  button.addEventListener("focus", () => button.matches(":focus-visible") && preview(mark));
  button.addEventListener("blur", () => preview(null));
  button.addEventListener("click", () => togglePin(mark));
  return { mark, button, canvas };
}

/** @param {Place | null} mark */
export function preview(mark) {
  if (state.preview === mark || (mark && same(mark, state.preview))) return;
  state.preview = mark;
  touch("marks");
}

/** Move the focus along the row, which previews the mask. @param {number} by */
export function step(by) {
  if (!tiles.length) return;
  const at = tiles.findIndex((tile) => tile.button === document.activeElement || same(tile.mark, state.preview));
  const next = at < 0 ? (by > 0 ? 0 : tiles.length - 1) : (at + by + tiles.length) % tiles.length;
  tiles[next].button.focus();
  tiles[next].button.scrollIntoView({ block: "nearest", inline: "nearest" });
  preview(tiles[next].mark);
}

/** Pin or release the mask that is previewed. */
export function pinCurrent() {
  if (state.preview) togglePin(state.preview);
}

function build() {
  const place = find("#strip", HTMLElement);
  const runs = state.scenes.map((scene, at) => {
    const marks = marksOf(at);
    const { strata, form } = scene.summary;
    const titles = {
      consensus: "one mask",
      kept: "readings that matter",
      bound: "guaranteed",
      centre: `${strata?.name ?? ""}s`,
      mask: form === "readers" ? "readers" : "masks, heaviest first",
      reader: "readers",
    };
    const kinds = /** @type {const} */ (["consensus", "kept", "bound", "centre", "mask", "reader"]);
    const groups = kinds.flatMap((kind) => {
      const own = marks.filter((mark) => mark.kind === kind).map(tileOf);
      if (!own.length) return [];
      tiles.push(...own);
      const title = state.scenes.length > 1 && kind !== "reader" ? `${scene.label}: ${titles[kind]}` : titles[kind];
      const row = element("div", { className: "tiles" }, ...own.map((tile) => tile.button));
      const group = element("section", { className: "group", data: { kind } }, element("h3", {}, title), row);
      group.setAttribute("aria-label", title);
      return [group];
    });
    return element("div", { className: "run" }, ...groups);
  });
  place.replaceChildren(...runs);
}

function rebuild() {
  tiles = [];
  build();
  redraw();
  states();
}

function redraw() {
  tiles.forEach(draw);
}

function states() {
  for (const { mark, button } of tiles) {
    const pin = state.pins.find((one) => same(one, mark));
    button.setAttribute("aria-pressed", String(!!pin));
    button.style.setProperty("--pin", pin ? pin.colour : "transparent");
    const { masks } = state.scenes[mark.scene].summary;
    const { count } = coverage(masks.map((mask) => mask.weight), state.coverage);
    button.classList.toggle("beyond", mark.kind === "mask" && state.contours.masks && mark.index >= count);
  }
}

export function start() {
  watch(["scenes"], rebuild);
  watch(["decided", "class"], () => {
    const now = state.scenes.flatMap((_, at) => marksOf(at));
    if (now.length !== tiles.length || !now.every((mark, i) => same(mark, tiles[i].mark))) rebuild();
    else redraw();
  });
  watch(["slice", "window"], redraw);
  watch(["marks", "contours"], states);
}
