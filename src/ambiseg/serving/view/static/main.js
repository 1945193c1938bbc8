/** Starts the page. */

import * as cases from "./cases.js";
import * as controls from "./controls.js";
import * as decide from "./decide.js";
import { find } from "./dom.js";
import * as histogram from "./histogram.js";
import * as keys from "./keys.js";
import * as opening from "./open.js";
import * as panels from "./panels.js";
import * as save from "./save.js";
import { begin, state } from "./state.js";
import * as strip from "./strip.js";

if (matchMedia("(max-width: 47.99rem)").matches) {
  state.panels = new Set(["contours"]);
  for (const details of document.querySelectorAll("#controls > details:not([data-first])"))
    /** @type {HTMLDetailsElement} */ (details).open = false;
}

addEventListener("unhandledrejection", (event) => {
  event.preventDefault();
  opening.complain(event.reason instanceof Error ? event.reason.message : String(event.reason));
});

try {
  const found = await begin();
  panels.start();
  strip.start();
  histogram.start();
  controls.start();
  decide.start();
  cases.start(found);
  save.start();
  keys.start();
  opening.start();
  find("body", HTMLElement).dataset.ready = "yes";
  if (state.about.open !== null) await opening.openEntry(state.about.open);
} catch (error) {
  opening.complain(error instanceof Error ? error.message : String(error));
}
