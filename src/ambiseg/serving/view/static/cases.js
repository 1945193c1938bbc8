/** The list of cases: of an evaluated run, of saved predictions, of annotated data, or the images of the command line. */

import { element, find } from "./dom.js";
import { openEntry } from "./open.js";
import { number, state, touch, watch } from "./state.js";

/** @typedef {import("./types.js").Entry} Entry */
/** @typedef {{key: string, title: string, explanation: string}} Column */

const AT_ONCE = 200; // rows that are shown; more on demand

/** @type {Column[]} */
let columns = [];
const order = { key: "", down: false };
let shown = AT_ONCE;
let filter = "";

/** @returns {Entry[]} that the filter leaves, sorted; those without a value last */
export function listed() {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = state.entries.filter((entry) => {
    const text = [entry.name, ...Object.values(entry.values)].join(" ").toLowerCase();
    return words.every((word) => fits(entry, word) ?? text.includes(word));
  });
  const { key, down } = order;
  if (!key) return found;
  return found.sort((a, b) => {
    const [one, other] = key === "name" ? [a.name, b.name] : [a.values[key] ?? null, b.values[key] ?? null];
    if (one === null || other === null) return Number(one === null) - Number(other === null);
    const less = typeof one === "number" && typeof other === "number" ? one - other : compare(String(one), String(other));
    return down ? -less : less;
  });
}

/** Numbers in names count as numbers. */
const { compare } = new Intl.Collator(undefined, { numeric: true });

/**
 * Whether an entry fits a word such as `ged>0.5` or `readers=4`; null for other words.
 * @param {Entry} entry
 * @param {string} word
 */
function fits(entry, word) {
  const parts = /^([a-z_]+)(<=|>=|<|>|=)(-?[\d.]+)$/.exec(word);
  const column = parts && columns.find((one) => one.key === parts[1] || one.title.toLowerCase() === parts[1]);
  if (!parts || !column) return null;
  const value = entry.values[column.key];
  if (typeof value !== "number") return false;
  const bound = Number(parts[3]);
  return { "<": value < bound, ">": value > bound, "=": value === bound, "<=": value <= bound, ">=": value >= bound }[
    /** @type {"<"} */ (parts[2])
  ];
}

/** Open the case after or before the one that is open, as the list is sorted. @param {1 | -1} by */
export function openNext(by) {
  const all = listed();
  if (!all.length) return;
  const at = all.findIndex((entry) => entry.index === state.entry);
  void openEntry(all[at < 0 ? (by > 0 ? 0 : all.length - 1) : (at + by + all.length) % all.length].index);
}

function head() {
  const cells = [{ key: "name", title: "Name", explanation: "of the image" }, ...columns].map(({ key, title, explanation }) => {
    const button = element("button", { type: "button", title: explanation }, title);
    button.addEventListener("click", () => {
      order.down = order.key === key ? !order.down : key !== "name";
      order.key = key;
      shown = AT_ONCE;
      touch("list");
    });
    const cell = element("th", { scope: "col", data: { key } }, button);
    return cell;
  });
  find("#cases thead", HTMLElement).replaceChildren(element("tr", {}, ...cells));
}

/** @param {Entry} entry */
function row(entry) {
  const button = element("button", { type: "button", className: "open", title: entry.name }, entry.name);
  button.addEventListener("click", () => void openEntry(entry.index));
  const cells = columns.map(({ key }) => {
    const value = entry.values[key] ?? null;
    return element("td", {}, value === null ? "–" : typeof value === "number" ? number(value) : value);
  });
  const made = element("tr", { data: { index: String(entry.index) } }, element("th", { scope: "row" }, button), ...cells);
  if (entry.index === state.entry) made.setAttribute("aria-current", "true");
  return made;
}

function build() {
  const all = listed();
  const body = find("#cases tbody", HTMLElement);
  const focused = document.activeElement?.closest("tr")?.dataset.index;
  body.replaceChildren(...all.slice(0, shown).map(row));
  if (focused) /** @type {HTMLElement | null} */ (body.querySelector(`tr[data-index="${focused}"] button`))?.focus();
  const { length } = state.entries;
  const count = all.length === length ? `${length}` : `${all.length} of ${length}`;
  find("#cases-count", HTMLElement).textContent = `${count} ${length === 1 ? "entry" : "entries"}`;
  const more = find("#cases-more", HTMLButtonElement);
  more.hidden = all.length <= shown;
  more.textContent = `Show ${Math.min(AT_ONCE, all.length - shown)} more`;
  for (const cell of document.querySelectorAll("#cases thead th")) {
    const mine = /** @type {HTMLElement} */ (cell).dataset.key === order.key;
    cell.setAttribute("aria-sort", mine ? (order.down ? "descending" : "ascending") : "none");
  }
}

/** @param {boolean} [open] */
export function toggleList(open) {
  const list = find("#cases", HTMLElement);
  const button = find("#list", HTMLButtonElement);
  const now = open ?? getComputedStyle(list).display === "none";
  document.body.dataset.list = now ? "open" : "closed";
  button.setAttribute("aria-expanded", String(now));
}

/** @param {{columns: Column[]}} found */
export function start(found) {
  columns = found.columns;
  const button = find("#list", HTMLButtonElement);
  button.addEventListener("click", () => toggleList());
  button.setAttribute("aria-expanded", String(getComputedStyle(find("#cases", HTMLElement)).display !== "none"));
  find("#cases-close", HTMLButtonElement).addEventListener("click", () => {
    toggleList(false);
    button.focus();
  });
  if (!state.entries.length) return;
  head();
  const input = find("#filter", HTMLInputElement);
  input.addEventListener("input", () => {
    filter = input.value;
    shown = AT_ONCE;
    touch("list");
  });
  find("#cases-more", HTMLButtonElement).addEventListener("click", () => {
    shown += AT_ONCE;
    touch("list");
  });
  watch(["list"], build);
  build();
}
