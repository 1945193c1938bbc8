/** The keyboard: every control has a key, and `?` lists them. */

import { openNext, toggleList } from "./cases.js";
import { nextRule, openSection, toggle } from "./decide.js";
import { changeWindow, goToLargest, nextClass, nextPreset, setCoverage, setDrag, zoomToMasks } from "./controls.js";
import { element, find } from "./dom.js";
import { fit, moveBy, togglePanel, zoomBy } from "./panels.js";
import { savePicture } from "./save.js";
import { PANELS, depth, goTo, state, touch } from "./state.js";
import { pinCurrent, preview, step } from "./strip.js";

/** @typedef {{keys: string[], shown?: string, what: string, act: (event: KeyboardEvent) => void}} Key */

const THEMES = ["auto", "light", "dark"];

export function nextTheme() {
  const root = document.documentElement;
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length];
  root.dataset.theme = next;
  const button = find("#theme", HTMLButtonElement);
  button.setAttribute("aria-label", `Theme: ${next}`);
  button.title = `Theme: ${next} (t)`;
  find("#theme-name", HTMLElement).textContent = next;
  touch("marks");
}

export function help() {
  const dialog = find("#help-panel", HTMLDialogElement);
  if (dialog.open) dialog.close();
  else dialog.showModal();
}

function nothing() {
  const menu = find("#save", HTMLDetailsElement);
  const at = document.activeElement;
  if (at instanceof HTMLInputElement && at.id === "filter") at.blur();
  else if (menu.open) menu.open = false;
  else if (state.preview) preview(null);
  else if (state.pins.length) {
    state.pins = [];
    touch("marks");
  }
}

/** @type {{title: string, keys: Key[]}[]} */
const GROUPS = [
  {
    title: "Masks",
    keys: [
      { keys: ["ArrowRight", "ArrowLeft"], shown: "← →", what: "preview the next or previous mask", act: ({ key }) => step(key === "ArrowRight" ? 1 : -1) },
      { keys: ["p", "Enter"], what: "pin the mask, or release it", act: pinCurrent },
      { keys: ["]", "["], shown: "[ ]", what: "fewer or more masks by the probability that they cover", act: ({ key }) => setCoverage(state.coverage + (key === "]" ? 0.05 : -0.05)) },
      { keys: ["c"], what: "next class", act: nextClass },
      { keys: ["a"], what: "open or close Decide", act: openSection },
      { keys: ["q"], what: "one mask: the next rule", act: nextRule },
      { keys: ["x", "i"], shown: "x i", what: "the readings that matter; guaranteed bounds", act: ({ key }) => toggle(key === "x" ? "kept" : "bounds") },
      { keys: ["Escape"], shown: "Esc", what: "leave the filter, close the menu, end the preview; then release all pins", act: nothing },
    ],
  },
  {
    title: "Image",
    keys: [
      { keys: ["ArrowDown", "ArrowUp", "PageDown", "PageUp"], shown: "↑ ↓ Page", what: "slices of a volume", act: slices },
      { keys: ["Home", "End"], what: "first and last slice", act: ({ key }) => void goTo(key === "Home" ? 0 : depth() - 1) },
      { keys: ["g"], what: "the slice where most of the class is expected", act: goToLargest },
      { keys: ["+", "=", "-"], shown: "+ −", what: "zoom", act: ({ key }) => zoomBy(key === "-" ? 1 / 1.25 : 1.25) },
      { keys: ["0"], what: "the whole image", act: fit },
      { keys: ["z"], what: "zoom to the masks", act: zoomToMasks },
      { keys: ["h", "j", "k", "l"], shown: "h j k l", what: "move left, down, up, right", act: ({ key }) => moveBy({ h: -0.1, l: 0.1 }[key] ?? 0, { j: 0.1, k: -0.1 }[key] ?? 0) },
      { keys: ["w"], what: "next window preset", act: () => void nextPreset(1) },
      { keys: [",", ".", "<", ">"], shown: ", . < >", what: "darker, brighter, narrower, wider window", act: windows },
      { keys: ["d"], what: "dragging moves the image, or changes the window", act: () => setDrag(state.drag === "pan" ? "window" : "pan") },
    ],
  },
  {
    title: "Page",
    keys: [
      { keys: ["1", "2", "3", "4"], shown: "1 2 3 4", what: "panels: contours, marginal, entropy, disagreement", act: ({ key }) => togglePanel(PANELS[Number(key) - 1]) },
      { keys: ["e", "r", "m"], shown: "e r m", what: "contours of strata, readers, masks", act: contours },
      { keys: ["n", "b"], shown: "n b", what: "next and previous case of the list", act: ({ key }) => openNext(key === "n" ? 1 : -1) },
      { keys: ["/"], what: "filter the list", act: filterList },
      { keys: ["o"], what: "open an image", act: () => find("#file", HTMLInputElement).click() },
      { keys: ["s"], what: "save what is on the screen as a PNG", act: () => void savePicture("png") },
      { keys: ["v"], what: "save it as an SVG", act: () => void savePicture("svg") },
      { keys: ["t"], what: "theme: as the system, light, dark", act: nextTheme },
      { keys: ["?"], what: "this list", act: help },
    ],
  },
];

/** @param {KeyboardEvent} event */
function slices({ key }) {
  const by = /** @type {Record<string, number>} */ ({ ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10 });
  void goTo(state.slice + by[key]);
}

/** @param {KeyboardEvent} event */
function windows({ key }) {
  changeWindow({ ",": 0.05, ".": -0.05 }[key] ?? 0, { "<": -0.1, ">": 0.1 }[key] ?? 0);
}

/** @param {KeyboardEvent} event */
function contours({ key }) {
  const kind = /** @type {const} */ ({ e: "strata", r: "readers", m: "masks" })[/** @type {"e"} */ (key)];
  state.contours[kind] = !state.contours[kind];
  touch("contours");
}

function filterList() {
  if (!state.entries.length) return;
  toggleList(true);
  find("#filter", HTMLInputElement).focus();
}

/** Keys that an element needs itself. @param {Element | null} at @param {string} key */
function taken(at, key) {
  if (at instanceof HTMLInputElement && at.type === "range") return /^(Arrow|Page|Home|End)/.test(key);
  if (at instanceof HTMLInputElement && at.type === "checkbox") return key === " ";
  if (at instanceof HTMLInputElement || at instanceof HTMLSelectElement) return key !== "Escape";
  const presses = at instanceof HTMLButtonElement || at?.tagName === "SUMMARY" || at instanceof HTMLAnchorElement;
  return presses && (key === "Enter" || key === " ");
}

export function start() {
  const table = new Map(GROUPS.flatMap(({ keys }) => keys.flatMap((one) => one.keys.map((key) => [key, one]))));
  addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const found = table.get(event.key);
    const dialog = find("#help-panel", HTMLDialogElement);
    if (!found || (dialog.open && event.key !== "?") || taken(document.activeElement, event.key)) return;
    const scrolls = /^(Arrow(Up|Down)|Page|Home|End)/.test(event.key);
    if (scrolls && depth() < 2) return; // the page scrolls
    event.preventDefault();
    found.act(event);
  });
  const groups = GROUPS.map(({ title, keys }) => {
    const rows = keys.flatMap(({ keys: own, shown, what }) => {
      const caps = (shown ?? own.join(" ")).split(" ").map((key) => element("kbd", {}, key));
      return [element("dt", {}, ...caps), element("dd", {}, what)];
    });
    return element("section", {}, element("h3", {}, title), element("dl", {}, ...rows));
  });
  find("#keys", HTMLElement).replaceChildren(...groups);
  find("#help", HTMLButtonElement).addEventListener("click", help);
  find("#help-close", HTMLButtonElement).addEventListener("click", help);
  find("#theme", HTMLButtonElement).addEventListener("click", nextTheme);
}
