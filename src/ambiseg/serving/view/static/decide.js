/** The section "Decide": one mask, the readings that matter, measurements, guarantees; asked for when it is opened. */

import { decoded, json, raw } from "./api.js";
import { element, find, say } from "./dom.js";
import { unitOf } from "./histogram.js";
import { complain } from "./open.js";
import { number, percent, sliceOf, state, touch, watch } from "./state.js";

/** @typedef {import("./types.js").Scene} Scene */
/** @typedef {import("./types.js").Decisions} Decisions */

export const RULES = {
  dice: "best expected overlap (Dice)",
  iou: "best expected overlap (IoU)",
  marginal: "most probable class",
  majority: "majority of the masks",
  union: "all that any mask has",
  intersection: "what all masks share",
};
const NAMES = { presence: "Presence", size: "Size", diameter: "Diameter", width: "Width", components: "Objects" };
const section = () => find("#decide", HTMLDetailsElement);

/** What is asked for: the number of masks, and the class that is measured. @param {Scene} scene */
function known(scene) {
  const { decisions } = scene;
  return !!decisions && decisions.kept.asked === state.decide.keep && decisions.class === state.cls;
}

/** Ask for what is missing of the scenes that are open, and then of their slices. */
async function load() {
  if (!section().open) return;
  try {
    await Promise.all(state.scenes.map(loadOne));
  } catch (error) {
    complain(error instanceof Error ? error.message : String(error));
  }
}

/** @param {Scene} scene */
async function loadOne(scene) {
  const { keep } = state.decide;
  if (!known(scene)) {
    const found = await json(`/v1/predictions/${scene.id}/decisions?keep=${keep}&of=${state.cls}`);
    if (!state.scenes.includes(scene) || keep !== state.decide.keep) return;
    scene.decisions = found;
    touch("decided");
  }
  const slice = sliceOf(scene);
  if (!slice || slice.keep === keep) return;
  const { k } = slice;
  const found = decoded(await raw(`/v1/predictions/${scene.id}/decisions/${k}?keep=${keep}`));
  if (keep !== state.decide.keep) return;
  const { consensus, kept, bounds } = found;
  Object.assign(slice, { consensus, kept, bounds, keep });
  for (const name of slice.made.keys()) if (/ (kept|consensus|bound) |^preview$/.test(name)) slice.made.delete(name);
  touch("decided", "marks");
}

/** Show or hide masks of this section; pins of those that are gone are released. @param {Partial<typeof state.decide>} change */
function change(change) {
  Object.assign(state.decide, change);
  const { rule, kept, bounds } = state.decide;
  const gone = { consensus: !rule || "rule" in change, kept: !kept || "keep" in change, bound: !bounds };
  state.pins = state.pins.filter((pin) => !(/** @type {Record<string, boolean>} */ (gone)[pin.kind]));
  if ((rule || kept || bounds) && !section().open) section().open = true; // which asks for them
  touch("decided", "marks", "contours");
  void load();
}

/** The next rule for one mask; after the last, none. */
export function nextRule() {
  const all = ["", ...Object.keys(RULES)];
  change({ rule: all[(all.indexOf(state.decide.rule) + 1) % all.length] });
  say(`one mask: ${RULES[/** @type {keyof typeof RULES} */ (state.decide.rule)] ?? "none"}`);
}

/** @param {"kept" | "bounds"} what */
export function toggle(what) {
  if (what === "bounds" && find("#bounds", HTMLElement).hidden) return;
  change({ [what]: !state.decide[what] });
}

export function openSection() {
  section().open = !section().open;
  if (section().open) find("#decide summary", HTMLElement).focus();
}

// -- what is said -----------------------------------------------------------------------------------------------------

/** @param {Scene} scene @param {number} pixels */
function size(scene, pixels) {
  const { factor, unit } = unitOf(scene.summary);
  return `${number(pixels * factor)} ${unit}`;
}

/** @param {Scene} scene @param {Decisions} found */
function aboutRule(scene, found) {
  const one = found.consensus.find(({ how }) => how === state.decide.rule);
  if (!one) return "";
  const dice = one.expected_dice === null ? "–" : one.expected_dice.toFixed(2);
  return `expected Dice ${dice}, ${size(scene, one.pixels[state.cls] ?? 0)}`;
}

/** @param {Decisions} found */
function aboutKept({ kept }) {
  const shares = kept.weights.map((weight) => percent(weight).replace(" ", "\u00a0")).join(", ");
  return kept.of <= kept.weights.length ? `there are no more: ${shares}` : `instead of ${kept.of}: ${shares}`;
}

/** @param {Scene} scene @param {Decisions} found */
function aboutBounds(scene, { bounds }) {
  const one = bounds?.classes.find((each) => each.class === state.cls);
  if (!bounds || !one) return "not for this class";
  const { factor, unit } = unitOf(scene.summary);
  const [low, high] = one.area.map((pixels) => number(pixels * factor));
  const who = bounds.per === "reading" ? "A reader's mask" : "Every reader's mask";
  return `${who} of a new patient lies between the two with probability ${percent(1 - bounds.alpha)}, its area between ${low} and ${high} ${unit} with the same.`;
}

/** @param {Decisions} found */
function table({ measurements }) {
  const rows = measurements.map(({ what, unit, mean, median, low, high }) => {
    const name = NAMES[/** @type {keyof typeof NAMES} */ (what)] ?? what;
    const cells = [text(median), `${text(low)} – ${text(high)}`].map((one) => element("td", {}, one));
    const share = element("td", { colSpan: 2 }, mean === null ? "–" : percent(mean)); // no median, and no interval
    return element("tr", {}, element("th", { scope: "row" }, unit ? `${name}, ${unit}` : name), ...(what === "presence" ? [share] : cells));
  });
  const head = ["", "median", "5–95 %"].map((one) => element("th", { scope: "col" }, one));
  return element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows));
}

/** @param {number | null} value */
function text(value) {
  return value === null ? "–" : number(value);
}

/** @param {string} id @param {(scene: Scene, found: Decisions) => string} say one line for each run */
function tell(id, say) {
  const lines = state.scenes.map((scene) => {
    const whose = state.scenes.length > 1 ? `${scene.label}: ` : "";
    const told = scene.decisions ? say(scene, scene.decisions) : "…";
    return element("span", {}, told && `${whose}${told}`);
  });
  find(id, HTMLElement).replaceChildren(...lines);
}

function show() {
  const { rule, kept, bounds, keep } = state.decide;
  find("#rule", HTMLSelectElement).value = rule;
  find("#show-kept", HTMLInputElement).checked = kept;
  find("#show-bounds", HTMLInputElement).checked = bounds;
  if (document.activeElement?.id !== "keep") find("#keep", HTMLInputElement).value = String(keep);
  if (!section().open || !state.scenes.length) return;
  tell("#rule-told", (scene, found) => (rule ? aboutRule(scene, found) : ""));
  tell("#kept-told", (_, found) => (kept ? aboutKept(found) : ""));
  tell("#bounds-told", (scene, found) => (bounds ? aboutBounds(scene, found) : ""));
  find("#bounds", HTMLElement).hidden = !state.scenes.some((scene) => scene.decisions?.bounds);
  const looks = state.scenes.flatMap(({ decisions, label }) => {
    if (!decisions?.look) return [];
    const { verdict, reasons, needed } = decisions.look;
    const whose = state.scenes.length > 1 ? `${label}: ` : "";
    const said = element(needed === null ? "span" : "b", {}, `${whose}${verdict}.`);
    return [element("div", { className: needed ? "look needed" : "look" }, said, ...reasons.map((one) => element("p", {}, one)))];
  });
  find("#look", HTMLElement).replaceChildren(...looks);
  const tables = state.scenes.flatMap(({ decisions, label }) => {
    if (!decisions) return [];
    return [...(state.scenes.length > 1 ? [element("h3", {}, label)] : []), table(decisions)];
  });
  find("#measured", HTMLElement).replaceChildren(...tables);
}

export function start() {
  const rule = find("#rule", HTMLSelectElement);
  rule.append(...Object.entries(RULES).map(([value, name]) => element("option", { value }, name)));
  rule.addEventListener("input", () => change({ rule: rule.value }));
  const boxes = /** @type {const} */ ([["#show-kept", "kept"], ["#show-bounds", "bounds"]]);
  for (const [id, what] of boxes) find(id, HTMLInputElement).addEventListener("input", () => toggle(what));
  const keep = find("#keep", HTMLInputElement);
  keep.addEventListener("input", () => {
    if (keep.value && keep.checkValidity()) change({ keep: keep.valueAsNumber, kept: true });
  });
  section().addEventListener("toggle", () => {
    show();
    void load();
  });
  watch(["scenes", "class", "slice"], () => void load());
  watch(["scenes", "class", "decided"], show);
}
