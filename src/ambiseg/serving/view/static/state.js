/** What the page shows, in one object; parts of the page are redrawn when it changes. */

import { json, slice as fetchSlice } from "./api.js";

/** @typedef {import("./types.js").Scene} Scene */
/** @typedef {import("./types.js").Slice} Slice */
/** @typedef {import("./types.js").Mark} Mark */
/** @typedef {import("./types.js").Kind} Kind */
/** @typedef {import("./types.js").PanelKind} PanelKind */

const KEPT = 24; // slices of each run that stay in memory

/** @type {PanelKind[]} */
export const PANELS = ["contours", "marginal", "entropy", "disagreement"];

export const state = {
  /** @type {import("./types.js").About} */
  about: /** @type {any} */ (null),
  /** @type {import("./types.js").Model[]} */
  models: [],
  /** @type {import("./types.js").Entry[]} */
  entries: [],
  /** @type {Scene[]} */
  scenes: [],
  /** @type {number | null} */
  entry: null, // of the list, that is open
  /** @type {File[]} */
  files: [], // that are open, if they were dropped or chosen
  slice: 0,
  cls: 1,
  /** @type {Set<PanelKind>} */
  panels: new Set(["contours", "marginal"]),
  opacity: { marginal: 0.7, entropy: 0.7, disagreement: 0.7 },
  contours: { strata: true, masks: false, readers: true, everywhere: false },
  coverage: 0.9,
  decide: { rule: "", kept: false, keep: 3, bounds: false }, // what of the section is drawn
  window: { low: 0, high: 255 },
  /** @type {"pan" | "window"} */
  drag: "pan",
  zoom: { scale: 1, x: 0.5, y: 0.5 }, // 1 fits the image into its panel; x and y of its middle as shares of the image
  /** @type {Mark[]} */
  pins: [],
  /** @type {Omit<Mark, "colour"> | null} */
  preview: null,
};

/** @typedef {"scenes" | "slice" | "class" | "panels" | "overlay" | "contours" | "window" | "zoom" | "marks" | "list" | "profile" | "decided"} Part */

/** @type {{parts: Set<Part>, run: () => void}[]} */
const watchers = [];
/** @type {Set<Part>} */
const changed = new Set();
let asked = false;

/**
 * Call a function once per frame in which any of these parts has changed.
 * @param {Part[]} parts
 * @param {() => void} run
 */
export function watch(parts, run) {
  watchers.push({ parts: new Set(parts), run });
}

/** @param {...Part} parts */
export function touch(...parts) {
  for (const part of parts) changed.add(part);
  if (asked) return;
  asked = true;
  requestAnimationFrame(() => {
    asked = false;
    const now = new Set(changed);
    changed.clear();
    for (const { parts: mine, run } of watchers) if ([...mine].some((part) => now.has(part))) run();
  });
}

/** @param {Scene} scene @param {number} [k] */
export function sliceOf(scene, k = state.slice) {
  return scene.slices.get(Math.min(k, scene.summary.slices - 1)) ?? null;
}

/** The number of slices of what is open. */
export function depth() {
  return Math.max(1, ...state.scenes.map((scene) => scene.summary.slices));
}

/** @type {Map<string, Promise<Slice>>} */
const fetching = new Map();

/**
 * @param {Scene} scene
 * @param {number} k
 * @returns {Promise<Slice>}
 */
export function load(scene, k) {
  const kept = scene.slices.get(k);
  if (kept) return Promise.resolve(kept);
  const key = `${scene.id} ${k}`;
  let promise = fetching.get(key);
  if (!promise) {
    promise = fetchSlice(scene.id, k)
      .then((found) => {
        const [, rows, columns] = scene.summary.spacing ?? [];
        if (rows && columns) found.tall = rows / columns;
        scene.slices.set(k, found);
        for (const far of scene.slices.keys()) {
          if (scene.slices.size <= KEPT) break;
          if (Math.abs(far - state.slice) > KEPT / 2) scene.slices.delete(far);
        }
        return found;
      })
      .finally(() => fetching.delete(key));
    fetching.set(key, promise);
  }
  return promise;
}

/**
 * Show another slice; what is beside it is fetched as well.
 * @param {number} k
 */
export async function goTo(k) {
  const last = depth() - 1;
  state.slice = Math.max(0, Math.min(last, Math.round(k)));
  touch("slice");
  const now = state.slice;
  await Promise.all(state.scenes.map((scene) => load(scene, Math.min(now, scene.summary.slices - 1))));
  touch("slice");
  if (state.slice === now)
    for (const scene of state.scenes)
      for (const near of [now + 1, now - 1])
        if (near >= 0 && near < scene.summary.slices) load(scene, near).catch(() => {});
}

/** @param {Omit<Mark, "colour">} a @param {Omit<Mark, "colour"> | null} b */
export function same(a, b) {
  return !!b && a.scene === b.scene && a.kind === b.kind && a.index === b.index;
}

/** @param {Omit<Mark, "colour">} mark */
export function togglePin(mark) {
  const at = state.pins.findIndex((pin) => same(pin, mark));
  if (at >= 0) state.pins.splice(at, 1);
  else {
    const taken = new Set(state.pins.map((pin) => pin.colour));
    const colours = state.about.palette.pins;
    const colour = colours.find((one) => !taken.has(one)) ?? colours[state.pins.length % colours.length];
    state.pins.push({ ...mark, colour });
  }
  touch("marks");
}

/**
 * The masks of a scene in the order of its row: what is decided by them, of strata, drawn, annotations.
 * @param {number} number
 * @returns {Omit<Mark, "colour">[]}
 */
export function marksOf(number) {
  const { summary, decisions } = state.scenes[number];
  const { rule, kept, bounds } = state.decide;
  const numbers = (/** @type {number} */ count) => Array.from({ length: count }, (_, index) => index);
  const ofClass = decisions?.bounds?.classes.findIndex((one) => one.class === state.cls) ?? -1;
  /** @type {[Kind, number[]][]} */
  const kinds = [
    ["consensus", [decisions?.consensus.findIndex(({ how }) => how === rule) ?? -1].filter((index) => index >= 0)],
    ["kept", numbers(kept ? (decisions?.kept.weights.length ?? 0) : 0)],
    ["bound", bounds && ofClass >= 0 ? [2 * ofClass, 2 * ofClass + 1] : []],
    ["centre", numbers(summary.strata?.weights.length ?? 0)],
    ["mask", numbers(summary.masks.length)],
    ["reader", numbers(number ? 0 : (summary.readers?.length ?? 0))],
  ];
  return kinds.flatMap(([kind, all]) => all.map((index) => ({ scene: number, kind, index })));
}

/**
 * @param {Slice} slice
 * @param {{kind: Kind, index: number}} mark
 */
export function labelsOf(slice, mark) {
  const { centres: centre, masks: mask, readers: reader, consensus, kept, bounds: bound } = slice;
  return { centre, mask, reader, consensus, kept, bound }[mark.kind][mark.index] ?? null;
}

/**
 * What a mask is called, and how probable it is.
 * @param {Omit<Mark, "colour">} mark
 * @returns {{name: string, weight: number | null}}
 */
export function nameOf(mark) {
  const { summary, decisions } = state.scenes[mark.scene];
  if (mark.kind === "consensus") return { name: "one mask", weight: null };
  if (mark.kind === "kept") return { name: `reading ${mark.index + 1}`, weight: decisions?.kept.weights[mark.index] ?? null };
  if (mark.kind === "bound") return { name: mark.index % 2 ? "inner" : "outer", weight: null };
  if (mark.kind === "reader") {
    const reader = summary.readers?.[mark.index];
    return { name: reader?.name ?? `reader ${mark.index + 1}`, weight: null };
  }
  if (mark.kind === "centre") {
    const { name, weights } = summary.strata ?? { name: "", weights: [] };
    return { name: `${name} ${mark.index + 1}`, weight: weights[mark.index] };
  }
  const mask = summary.masks[mark.index];
  return { name: mask.name ?? `mask ${mark.index + 1}`, weight: mask.weight };
}

/**
 * The fixed colour of a mask: of its stratum or its reader.
 * @param {Omit<Mark, "colour">} mark
 */
export function colourOf(mark) {
  const { palette } = state.about;
  const { summary } = state.scenes[mark.scene];
  if (mark.kind === "consensus") return palette.decided[0];
  if (mark.kind === "bound") return palette.decided[1 + (mark.index % 2)];
  if (mark.kind === "kept") return palette.decided[3 + (mark.index % (palette.decided.length - 3))];
  if (mark.kind === "reader") return palette.readers[mark.index % palette.readers.length];
  if (mark.kind === "centre") return palette.strata[mark.index % palette.strata.length];
  const [stratum] = summary.masks[mark.index].strata ?? [];
  if (summary.form === "readers") return palette.readers[mark.index % palette.readers.length];
  return stratum ? palette.strata[(stratum - 1) % palette.strata.length] : palette.strata[0];
}

/** @param {number} share */
export function percent(share) {
  const value = 100 * share;
  return value > 0 && value < 0.1 ? "< 0.1 %" : `${value.toFixed(value < 9.95 ? 1 : 0)} %`;
}

/** To so many digits; whole numbers have all of theirs. @param {number} value @param {number} [digits] */
export function number(value, digits = 3) {
  const whole = Math.floor(Math.log10(Math.max(Math.abs(value), 1))) + 1;
  const text = Number.isFinite(value) ? String(Number(value.toPrecision(Math.min(Math.max(digits, whole), 100)))) : "–";
  return text.replace("-", "−");
}

/** What the server knows at the start. */
export async function begin() {
  const [about, models, cases] = await Promise.all([json("/v1/view"), json("/v1/models"), json("/v1/cases")]);
  state.about = about;
  state.models = models.models;
  state.entries = cases.cases;
  state.cls = about.evaluated[0] ?? 1;
  return cases;
}
