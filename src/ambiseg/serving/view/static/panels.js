/** The panels: the image with contours, and maps over it, which zoom, move and change their window together. */

import { context, coverage, disagreement, filled, heat, heatTable, once, outlineOf, picture } from "./raster.js";
import { PANELS, colourOf, goTo, depth, labelsOf, marksOf, number, sliceOf, state, touch, watch } from "./state.js";
import { element, find } from "./dom.js";

/** @typedef {import("./types.js").Scene} Scene */
/** @typedef {import("./types.js").Slice} Slice */
/** @typedef {import("./types.js").PanelKind} PanelKind */
/** @typedef {import("./types.js").Mark} Mark */
/** @typedef {{d: string, path: Path2D, colour: string, width: number, dash: boolean, fill: number}} Line */
/** @typedef {{canvas: HTMLCanvasElement, opacity: number}} Layer */
/** @typedef {{scene: number, kind: PanelKind, canvas: HTMLCanvasElement, figure: HTMLElement}} Panel */

const TITLES = { contours: "Contours", marginal: "Marginal", entropy: "Entropy", disagreement: "Disagreement" };
const DECIDED = new Set(["kept", "bound", "consensus"]);
const MOST = 40; // of zoom: pixels of the screen per pixel of the image, about

/** @type {Panel[]} */
export let panels = [];
/** @type {Uint32Array} */
let table;

/**
 * The contours of a panel, in the order they are drawn.
 * @param {number} at number of the scene
 * @param {Slice} slice
 * @param {PanelKind} kind
 * @returns {Line[]}
 */
export function lines(at, slice, kind) {
  /** @type {Line[]} */
  const found = [];
  const { contours, preview, pins } = state;
  const { summary } = state.scenes[at];
  /** @param {Omit<Mark, "colour">} mark readers are those of the first scene */
  const shape = (mark) => outlineOf(slice, mark, labelsOf(slice, mark), state.cls);
  if (kind === "contours" || contours.everywhere) {
    const weights = summary.masks.map((mask) => mask.weight);
    const { count } = coverage(weights, state.coverage);
    const own = marksOf(at);
    const decided = own.filter((one) => DECIDED.has(one.kind)).reverse(); // on top of the others, the one mask last
    const shared = at ? marksOf(0).filter((one) => one.kind === "reader") : [];
    for (const mark of [...own.filter((one) => !DECIDED.has(one.kind)), ...shared, ...decided]) {
      const { kind: what, index } = mark;
      const choices = { centre: contours.strata, mask: contours.masks && index < count, reader: contours.readers };
      const chosen = /** @type {Record<string, boolean>} */ (choices)[what] ?? true; // what is decided is shown if it is there
      if (!chosen) continue;
      const width = what === "consensus" ? 3 : what === "mask" && summary.form !== "readers" ? 1 : 2;
      found.push({ ...shape(mark), colour: colourOf(mark), width, dash: what === "reader" || what === "bound", fill: 0 });
    }
  }
  for (const pin of pins)
    if (pin.scene === at || pin.kind === "reader")
      found.push({ ...shape(pin), colour: pin.colour, width: 3, dash: false, fill: 0.15 });
  if (preview && (preview.scene === at || preview.kind === "reader"))
    found.push({ ...shape(preview), colour: "#ffffff", width: 2.5, dash: false, fill: 0 });
  return found.filter((line) => line.d);
}

/**
 * The pictures of a panel, in the order they are drawn.
 * @param {number} at
 * @param {Slice} slice
 * @param {PanelKind} kind
 * @returns {Layer[]}
 */
export function layers(at, slice, kind) {
  const scene = state.scenes[at];
  const { low, high } = state.window;
  /** @type {Layer[]} */
  const found = [{ canvas: picture(slice, low, high), opacity: 1 }];
  const values = kind === "contours" ? null : mapOf(scene, slice, kind);
  if (values && kind !== "contours") {
    table ??= heatTable(state.about.palette.heat);
    const version = kind === "marginal" ? `${state.cls}` : "";
    const canvas = once(slice, `heat ${kind}`, version, () => heat(values, slice.h, slice.w, table));
    found.push({ canvas, opacity: state.opacity[kind] });
  }
  const { preview } = state;
  if (kind === "contours" && preview && (preview.scene === at || preview.kind === "reader")) {
    const labels = labelsOf(slice, preview);
    if (labels) {
      const canvas = once(slice, "preview", `${preview.kind} ${preview.index}`, () =>
        filled(labels, slice.h, slice.w, scene.colours),
      );
      found.push({ canvas, opacity: 0.4 });
    }
  }
  return found;
}

/**
 * 255 times a map's share of its largest value.
 * @param {Scene} scene
 * @param {Slice} slice
 * @param {"marginal" | "entropy" | "disagreement"} kind
 * @returns {Uint8Array | null}
 */
export function mapOf(scene, slice, kind) {
  if (kind === "marginal") return slice.marginal[state.cls] ?? null;
  if (kind === "entropy") return slice.entropy;
  const weights = scene.summary.masks.map((mask) => mask.weight);
  return once(slice, "disagreement", "", () => disagreement(slice.masks, weights, scene.summary.classes.length));
}

/** @param {Scene} scene @param {PanelKind} kind the largest value of a map */
export function topOf(scene, kind) {
  const classes = scene.summary.classes.length;
  return { contours: 0, marginal: 1, entropy: Math.log(classes), disagreement: 1 - 1 / classes }[kind];
}

/**
 * Where an image of h × w is drawn in a panel of these sides.
 * @param {{h: number, w: number, tall: number}} slice
 * @param {number} width
 * @param {number} height
 */
export function placed(slice, width, height) {
  const h = slice.h * slice.tall;
  const scale = Math.min(width / slice.w, height / h) * state.zoom.scale;
  const x = width / 2 - state.zoom.x * slice.w * scale;
  const y = height / 2 - state.zoom.y * h * scale;
  return { scale, x, y };
}

/**
 * Draw a panel into a context whose unit is a pixel of the page.
 * @param {CanvasRenderingContext2D} to
 * @param {number} at
 * @param {PanelKind} kind
 * @param {number} width
 * @param {number} height
 */
export function paint(to, at, kind, width, height) {
  to.fillStyle = "#0d1117";
  to.fillRect(0, 0, width, height);
  const scene = state.scenes[at];
  const slice = scene && sliceOf(scene);
  if (!slice) return;
  const { scale, x, y } = placed(slice, width, height);
  to.save();
  to.beginPath();
  to.rect(0, 0, width, height);
  to.clip();
  to.translate(x, y);
  to.scale(scale, scale);
  to.imageSmoothingEnabled = scale < 1;
  for (const { canvas, opacity } of layers(at, slice, kind)) {
    to.globalAlpha = opacity;
    to.drawImage(canvas, 0, 0, slice.w, slice.h * slice.tall);
  }
  to.lineJoin = "round";
  for (const { path, colour, width: thick, dash, fill } of lines(at, slice, kind)) {
    to.globalAlpha = fill;
    to.fillStyle = colour;
    if (fill) to.fill(path);
    to.globalAlpha = 0.55;
    to.setLineDash([]);
    to.strokeStyle = "#000000";
    to.lineWidth = (thick + 1.5) / scale;
    to.stroke(path);
    to.globalAlpha = 1;
    to.setLineDash(dash ? [6 / scale, 3 / scale] : []);
    to.strokeStyle = colour;
    to.lineWidth = thick / scale;
    to.stroke(path);
  }
  to.restore();
}

/** @param {Panel} panel */
function draw({ canvas, scene, kind }) {
  const ratio = window.devicePixelRatio || 1;
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) Object.assign(canvas, { width: w, height: h });
  const to = context(canvas);
  to.setTransform(ratio, 0, 0, ratio, 0, 0);
  paint(to, scene, kind, width, height);
}

/** @param {number} at @param {PanelKind} kind */
export function titleOf(at, kind) {
  const scene = state.scenes[at];
  const what = kind === "marginal" && scene ? `Marginal of ${scene.summary.classes[state.cls]}` : TITLES[kind];
  return state.scenes.length > 1 && scene ? `${scene.label}: ${what.toLowerCase()}` : what;
}

/** As many panels as are shown, each with its title and the scale of its colours. */
function build() {
  const place = find("#panels", HTMLElement);
  const shown = PANELS.filter((kind) => state.panels.has(kind));
  const count = Math.max(1, state.scenes.length, state.models.length);
  const wanted = shown.flatMap((kind) => Array.from({ length: count }, (_, scene) => ({ kind, scene })));
  place.dataset.count = String(wanted.length);
  place.dataset.runs = String(count);
  if (wanted.map(({ kind, scene }) => kind + scene).join() !== panels.map((p) => p.kind + p.scene).join()) {
    panels = wanted.map(({ kind, scene }) => {
      const canvas = element("canvas", { tabIndex: 0 });
      canvas.setAttribute("role", "img");
      const figure = element("figure", { className: "panel" }, element("figcaption", {}), canvas);
      const panel = { scene, kind, canvas, figure };
      listen(panel);
      return panel;
    });
    place.replaceChildren(...panels.map((panel) => panel.figure));
  }
  for (const { scene, kind, canvas, figure } of panels) {
    const caption = /** @type {HTMLElement} */ (figure.firstElementChild);
    caption.replaceChildren(element("span", { className: "what", title: titleOf(scene, kind) }, titleOf(scene, kind)));
    canvas.setAttribute("aria-label", `${titleOf(scene, kind)} of ${state.scenes[scene]?.summary.name ?? "no image"}`);
    if (kind === "contours" || !state.scenes[scene]) continue;
    const top = element("span", {}, number(topOf(state.scenes[scene], kind), 2));
    caption.append(element("span", { className: "scale" }, "0", element("i", { className: "heat" }), top));
  }
  redraw();
}

function redraw() {
  panels.forEach(draw);
}

/** @param {number} factor @param {[number, number]} [keep] point of the image that stays where it is, as shares */
export function zoomBy(factor, keep = [state.zoom.x, state.zoom.y]) {
  const { zoom } = state;
  const scale = Math.max(0.5, Math.min(MOST, zoom.scale * factor));
  const share = zoom.scale / scale;
  zoom.x = keep[0] + (zoom.x - keep[0]) * share;
  zoom.y = keep[1] + (zoom.y - keep[1]) * share;
  zoom.scale = scale;
  touch("zoom");
}

/** @param {number} x @param {number} y shares of what is visible */
export function moveBy(x, y) {
  state.zoom.x = Math.max(0, Math.min(1, state.zoom.x + x / state.zoom.scale));
  state.zoom.y = Math.max(0, Math.min(1, state.zoom.y + y / state.zoom.scale));
  touch("zoom");
}

export function fit() {
  state.zoom = { scale: 1, x: 0.5, y: 0.5 };
  touch("zoom");
}

/**
 * The point of the image under the pointer, in pixels; it may be outside.
 * @param {Panel} panel
 * @param {{clientX: number, clientY: number}} event
 */
function pointed(panel, event) {
  const scene = state.scenes[panel.scene];
  const slice = scene && sliceOf(scene);
  if (!slice) return null;
  const box = panel.canvas.getBoundingClientRect();
  const { scale, x, y } = placed(slice, box.width, box.height);
  const down = scale * slice.tall;
  return { slice, scene, x: (event.clientX - box.left - x) / scale, y: (event.clientY - box.top - y) / down, scale };
}

/** @param {Panel} panel */
function listen(panel) {
  const { canvas } = panel;
  /** @type {Map<number, PointerEvent>} */
  const down = new Map();
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button === 1) return;
    canvas.setPointerCapture(event.pointerId);
    down.set(event.pointerId, event);
  });
  for (const name of /** @type {const} */ (["pointerup", "pointercancel"]))
    canvas.addEventListener(name, (event) => down.delete(event.pointerId));
  canvas.addEventListener("contextmenu", (event) => event.preventDefault()); // the right button changes the window
  canvas.addEventListener("pointerleave", () => touchReadout(null));
  canvas.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    const found = pointed(panel, event);
    touchReadout(found);
    if (!before || !found) return;
    const [dx, dy] = [event.clientX - before.clientX, event.clientY - before.clientY];
    const { slice, scale } = found;
    if (down.size === 2) {
      const other = [...down.values()].find((one) => one.pointerId !== event.pointerId);
      if (other) {
        const distance = (/** @type {PointerEvent} */ one) =>
          Math.hypot(one.clientX - other.clientX, one.clientY - other.clientY);
        zoomBy(distance(event) / Math.max(distance(before), 1), [found.x / slice.w, found.y / slice.h]);
      }
    } else if (state.drag === "window" || before.buttons === 2 || before.shiftKey) {
      const width = state.window.high - state.window.low;
      const middle = state.window.low + width / 2 - (dy * width) / 300;
      const wide = Math.max(width * (1 + dx / 300), 1e-6);
      state.window = { low: middle - wide / 2, high: middle + wide / 2 };
      touch("window");
    } else {
      state.zoom.x = Math.max(0, Math.min(1, state.zoom.x - dx / (slice.w * scale)));
      state.zoom.y = Math.max(0, Math.min(1, state.zoom.y - dy / (slice.h * slice.tall * scale)));
      touch("zoom");
    }
    down.set(event.pointerId, event);
  });
  canvas.addEventListener("dblclick", fit);
  let turned = 0;
  canvas.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      if (depth() > 1 && !event.ctrlKey) {
        turned += event.deltaY;
        const steps = Math.trunc(turned / 40);
        if (!steps) return;
        turned = 0;
        void goTo(state.slice + Math.sign(steps));
        return;
      }
      const found = pointed(panel, event);
      if (found) zoomBy(Math.exp(-event.deltaY / 400), [found.x / found.slice.w, found.y / found.slice.h]);
    },
    { passive: false },
  );
}

/** @param {ReturnType<typeof pointed>} found */
function touchReadout(found) {
  const place = find("#readout", HTMLElement);
  if (!found) {
    place.textContent = "";
    return;
  }
  const { slice, scene } = found;
  const [x, y] = [Math.floor(found.x), Math.floor(found.y)];
  if (x < 0 || y < 0 || x >= slice.w || y >= slice.h) {
    place.textContent = "";
    return;
  }
  const i = y * slice.w + x;
  const { classes, units } = scene.summary;
  const n = slice.h * slice.w;
  const shown = Math.min(slice.channels, 3);
  const values = slice.image ? Array.from({ length: shown }, (_, c) => number(slice.image?.[c * n + i] ?? NaN, 4)) : [];
  const parts = [`x ${x}, y ${y}`];
  if (values.length) parts.push(`${values.join(" ")}${units ? ` ${units}` : ""}`);
  const marginal = mapOf(scene, slice, "marginal");
  if (marginal) parts.push(`p(${classes[state.cls]}) ${(marginal[i] / 255).toFixed(2)}`);
  for (const kind of /** @type {const} */ (["entropy", "disagreement"])) {
    const values = mapOf(scene, slice, kind);
    if (values) parts.push(`${kind} ${((values[i] / 255) * topOf(scene, kind)).toFixed(2)}`);
  }
  place.textContent = parts.join(" · ");
}

/** @param {PanelKind} kind */
export function togglePanel(kind) {
  if (!state.panels.delete(kind)) state.panels.add(kind);
  if (!state.panels.size) state.panels.add("contours");
  touch("panels");
}

export function start() {
  watch(["scenes", "panels", "class", "contours"], build);
  watch(["slice", "overlay", "window", "zoom", "marks", "decided"], redraw);
  new ResizeObserver(redraw).observe(find("#panels", HTMLElement));
  build();
}
