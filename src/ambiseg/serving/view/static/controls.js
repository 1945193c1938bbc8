/** The controls beside the panels, and what they show of the state. */

import { element, find, shape } from "./dom.js";
import { fit, togglePanel, zoomBy } from "./panels.js";
import { coverage } from "./raster.js";
import { PANELS, depth, goTo, number, percent, sliceOf, state, touch, watch } from "./state.js";
import { focusOf } from "./strip.js";

/** @typedef {import("./types.js").PanelKind} PanelKind */
/** @typedef {{name: string, low: number, high: number}} Preset */

/** Windows of CT that readers know, by level and width. */
const CT = /** @type {const} */ ([
  ["Lung", -600, 1500],
  ["Soft tissue", 40, 400],
  ["Bone", 400, 1800],
  ["Brain", 40, 80],
]);

/** @returns {Preset[]} for what is open, the one to start with first */
export function presets() {
  const scene = state.scenes[0];
  if (!scene) return [];
  const model = state.models[scene.model];
  const slice = sliceOf(scene);
  /** @type {Preset[]} */
  const found = [];
  const { range, units } = scene.summary;
  const own = model?.window;
  const shared = own ? Math.min(own[1], range[1]) - Math.max(own[0], range[0]) : 0;
  const fits = own && shared > 0.2 * (own[1] - own[0]) && shared > 0.2 * (range[1] - range[0]); // else: other units
  if (own && fits) found.push({ name: "Model", low: own[0], high: own[1] });
  found.push({ name: "All values", low: range[0], high: range[1] > range[0] ? range[1] : range[0] + 1 });
  if (slice?.image) {
    const some = Float32Array.from(slice.image.filter((_, i) => i % Math.ceil(slice.h * slice.w / 20000) === 0)).sort();
    const [low, high] = [some[Math.floor(0.01 * (some.length - 1))], some[Math.ceil(0.99 * (some.length - 1))]];
    if (high > low) found.push({ name: "1 to 99 %", low, high });
  }
  if ((units || model?.units) === "HU")
    for (const [name, level, width] of CT) found.push({ name, low: level - width / 2, high: level + width / 2 });
  return found;
}

/** Put the masks into the middle of the panels. */
export function zoomToMasks() {
  const scene = state.scenes[0];
  const slice = scene && sliceOf(scene);
  if (!slice) return;
  const { x, y, side } = focusOf(slice);
  const h = slice.h * slice.tall;
  const scale = Math.max(1, Math.max(h, slice.w) / side);
  state.zoom = { scale, x: (x + side / 2) / slice.w, y: (y + side / 2) / h };
  touch("zoom");
}

/** Go to the slice where most of the class is expected. */
export function goToLargest() {
  const profile = state.scenes[0]?.profile;
  if (!profile) return;
  const sizes = profile.map((expected) => expected[state.cls] ?? 0);
  void goTo(sizes.indexOf(Math.max(...sizes)));
}

/** @param {1 | -1} by */
export function nextPreset(by) {
  const all = presets();
  if (!all.length) return;
  const at = all.findIndex(({ low, high }) => low === state.window.low && high === state.window.high);
  const { low, high, name } = all[(at + by + all.length) % all.length];
  state.window = { low, high };
  touch("window");
  return name;
}

/** @param {number} level @param {number} width relative to the present width, to add */
export function changeWindow(level, width) {
  const { low, high } = state.window;
  const wide = (high - low) * (1 + width);
  const middle = (low + high) / 2 + level * (high - low);
  state.window = { low: middle - wide / 2, high: middle + wide / 2 };
  touch("window");
}

/** @param {number} share */
export function setCoverage(share) {
  state.coverage = Math.max(0, Math.min(1, share));
  state.contours.masks = true;
  touch("contours");
}

export function nextClass() {
  const classes = state.scenes[0]?.summary.classes.length ?? 2;
  state.cls = (state.cls + 1) % classes;
  touch("class");
}

/** @param {"pan" | "window"} drag */
export function setDrag(drag) {
  state.drag = drag;
  for (const one of /** @type {const} */ (["pan", "window"]))
    find(`#drag-${one}`, HTMLButtonElement).setAttribute("aria-pressed", String(one === drag));
  find("#panels", HTMLElement).dataset.drag = drag;
}

/** @param {string} id @param {(input: HTMLInputElement) => void} act */
function on(id, act) {
  const input = find(id, HTMLInputElement);
  input.addEventListener("input", () => act(input));
}

export function start() {
  for (const kind of PANELS) on(`#show-${kind}`, () => togglePanel(kind));
  for (const kind of /** @type {const} */ (["marginal", "entropy", "disagreement"]))
    on(`#opacity-${kind}`, (input) => {
      state.opacity[kind] = input.valueAsNumber / 100;
      touch("overlay");
    });
  for (const kind of /** @type {const} */ (["strata", "masks", "readers", "everywhere"]))
    on(`#contours-${kind}`, (input) => {
      state.contours[kind] = input.checked;
      touch("contours");
    });
  on("#coverage", (input) => setCoverage(input.valueAsNumber / 100));
  on("#slice", (input) => void goTo(input.valueAsNumber));
  const chosen = find("#class", HTMLSelectElement);
  chosen.addEventListener("input", () => {
    state.cls = Number(chosen.value);
    touch("class");
  });
  const preset = find("#preset", HTMLSelectElement);
  preset.addEventListener("input", () => {
    const found = presets()[Number(preset.value)];
    if (found) state.window = { low: found.low, high: found.high };
    touch("window");
  });
  for (const end of /** @type {const} */ (["low", "high"])) {
    const input = find(`#${end}`, HTMLInputElement);
    input.addEventListener("change", () => {
      const value = input.valueAsNumber;
      const fits = end === "low" ? value < state.window.high : value > state.window.low;
      input.setCustomValidity(fits ? "" : "expected low < high");
      input.reportValidity();
      if (fits) state.window = { ...state.window, [end]: value };
      touch("window");
    });
  }
  for (const drag of /** @type {const} */ (["pan", "window"]))
    find(`#drag-${drag}`, HTMLButtonElement).addEventListener("click", () => setDrag(drag));
  /** @type {[string, () => void][]} */
  const buttons = [
    ["#zoom-in", () => zoomBy(1.4)],
    ["#zoom-out", () => zoomBy(1 / 1.4)],
    ["#zoom-fit", fit],
    ["#zoom-masks", zoomToMasks],
    ["#largest", goToLargest],
    ["#unpin", () => {
      state.pins = [];
      touch("marks");
    }],
  ];
  for (const [id, act] of buttons) find(id, HTMLButtonElement).addEventListener("click", act);
  watch(["scenes", "panels", "overlay", "contours", "class"], showChoices);
  watch(["scenes", "window", "slice"], showWindow);
  watch(["scenes", "slice"], showSlice);
  watch(["scenes", "profile", "class"], showProfile);
  watch(["marks"], () => {
    find("#unpin", HTMLButtonElement).disabled = !state.pins.length;
  });
  showChoices();
}

function showChoices() {
  const scene = state.scenes[0];
  for (const kind of PANELS) find(`#show-${kind}`, HTMLInputElement).checked = state.panels.has(kind);
  for (const kind of /** @type {const} */ (["strata", "masks", "readers", "everywhere"]))
    find(`#contours-${kind}`, HTMLInputElement).checked = state.contours[kind];
  const strata = find("#contours-strata", HTMLInputElement);
  strata.disabled = !!scene && state.scenes.every((one) => !one.summary.strata);
  const readers = find("#contours-readers", HTMLInputElement);
  readers.disabled = !!scene && !scene.summary.readers?.length;
  const word = state.scenes.find((one) => one.summary.strata)?.summary.strata?.name ?? state.models[0]?.stratum;
  const alone = state.about.kind === "data";
  find("#contours-masks-name", HTMLElement).textContent = alone ? "of readers" : "of the heaviest masks";
  find("#coverage-what", HTMLElement).textContent = alone ? "Readers who together have" : "Masks that cover";
  find("#coverage-of", HTMLElement).textContent = alone ? "of the weight" : "of the probability";
  find("#contours-strata-name", HTMLElement).textContent = word ? `every ${word}` : "strata";
  const percents = Math.round(100 * state.coverage);
  const slider = find("#coverage", HTMLInputElement);
  slider.value = String(percents);
  find("#coverage-share", HTMLElement).textContent = `${percents} %`;
  find("#coverage-count", HTMLElement).textContent = scene
    ? state.scenes
        .map(({ summary, label }) => {
          const { count, covered } = coverage(summary.masks.map((mask) => mask.weight), state.coverage);
          const whose = state.scenes.length > 1 ? `${label}: ` : "";
          return `${whose}${count} of ${summary.masks.length} ${alone ? "readers" : "masks"}, ${percent(covered)}`;
        })
        .join("; ")
    : "no masks yet";
  slider.setAttribute("aria-valuetext", `${percents} %`);
  const select = find("#class", HTMLSelectElement);
  const names = scene?.summary.classes ?? state.models[0]?.classes ?? [];
  if (select.dataset.names !== names.join("\n")) {
    select.dataset.names = names.join("\n");
    select.replaceChildren(...names.map((name, i) => element("option", { value: String(i) }, name)));
  }
  select.value = String(state.cls);
  find("#class-colour", HTMLElement).style.background = scene?.colours[state.cls] ?? "transparent";
}

function showWindow() {
  const { low, high } = state.window;
  const wide = high - low;
  const digits = wide > 20 ? 0 : wide > 0.2 ? 2 : 5;
  for (const [id, value] of /** @type {const} */ ([["#low", low], ["#high", high]])) {
    const input = find(id, HTMLInputElement);
    if (document.activeElement !== input) input.value = String(Number(value.toFixed(digits)));
  }
  const select = find("#preset", HTMLSelectElement);
  const all = presets();
  const text = all.map(({ name, low, high }) => `${name} (${number(low)} to ${number(high)})`);
  if (select.dataset.names !== text.join("\n")) {
    select.dataset.names = text.join("\n");
    const own = element("option", { value: "", hidden: true }, "own values");
    select.replaceChildren(own, ...text.map((name, i) => element("option", { value: String(i) }, name)));
  }
  const at = all.findIndex((one) => one.low === low && one.high === high);
  select.value = at < 0 ? "" : String(at);
  const units = state.scenes[0]?.summary.units;
  find("#window-units", HTMLElement).textContent = units ? `, ${units}` : "";
}

function showSlice() {
  const count = depth();
  const input = find("#slice", HTMLInputElement);
  input.max = String(count - 1);
  input.value = String(state.slice);
  input.disabled = count < 2;
  find("#slices", HTMLElement).classList.toggle("single", count < 2);
  find("#slice-number", HTMLElement).textContent = count > 1 ? `slice ${state.slice + 1} of ${count}` : "one slice";
}

/** How much of the class is expected in each slice, under the slider. */
function showProfile() {
  const place = find("#profile", HTMLElement);
  const profile = state.scenes[0]?.profile;
  const sizes = (profile ?? []).map((expected) => expected[state.cls] ?? 0);
  const most = Math.max(...sizes, 1e-9);
  const points = sizes.map((size, k) => `L${k} ${1 - size / most}`).join("");
  const svg = shape("svg", { viewBox: `0 0 ${Math.max(sizes.length - 1, 1)} 1`, preserveAspectRatio: "none" });
  svg.append(shape("path", { d: `M0 1${points}L${Math.max(sizes.length - 1, 0)} 1z` }));
  place.replaceChildren(...(sizes.length > 1 ? [svg] : []));
  find("#largest", HTMLButtonElement).disabled = sizes.length < 2;
}
