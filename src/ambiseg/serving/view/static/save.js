/** What is on the screen as a PNG or an SVG, and the masks as files of the server. */

import { element, find, say } from "./dom.js";
import { panels, layers, lines, paint, placed, titleOf } from "./panels.js";
import { canvasOf, context } from "./raster.js";
import { colourOf, marksOf, nameOf, percent, sliceOf, state } from "./state.js";
import { complain } from "./open.js";

const [GAP, TITLE, ROW] = [12, 22, 20];

/** @param {Blob} blob @param {string} name */
function offer(blob, name) {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
  say(`${name} is saved`);
}

/** A file name without what file systems refuse. @param {string} end */
function named(end) {
  const { name, slices } = state.scenes[0].summary;
  const clean = name.replace(/[^\p{L}\p{N}._-]+/gu, "_").replace(/^[._]+/, "") || "image";
  return `${clean}${slices > 1 ? `_slice${state.slice + 1}` : ""}.${end}`;
}

/** Which contour is which: those of strata and readers that are shown, and the masks that are pinned. */
export function legend() {
  const { contours, pins } = state;
  const shown = state.scenes.flatMap((_, at) =>
    marksOf(at).filter(({ kind }) => (kind === "centre" ? contours.strata : kind === "reader" ? contours.readers : kind !== "mask")),
  );
  return [...shown.map((mark) => ({ ...mark, colour: colourOf(mark) })), ...pins].map((mark) => {
    const { name, weight } = nameOf(mark);
    const whose = state.scenes.length > 1 && mark.kind !== "reader" ? `${state.scenes[mark.scene].label}: ` : "";
    return { colour: mark.colour, text: `${whose}${name}${weight === null ? "" : ` ${percent(weight)}`}` };
  });
}

/** Where everything goes on the picture, in pixels of the page. */
function layout() {
  const boxes = panels.map(({ canvas }) => canvas.getBoundingClientRect());
  const left = Math.min(...boxes.map((box) => box.left));
  const tops = [...new Set(boxes.map((box) => Math.round(box.top)))].sort((a, b) => a - b);
  const rows = tops.map((top) => boxes.filter((box) => Math.round(box.top) === top));
  const places = boxes.map((box) => {
    const row = tops.indexOf(Math.round(box.top));
    const above = rows.slice(0, row).reduce((sum, some) => sum + some[0].height + TITLE + GAP, 0);
    return { x: box.left - left + GAP, y: above + TITLE + GAP, width: box.width, height: box.height };
  });
  const width = Math.max(...places.map((place) => place.x + place.width)) + GAP;
  const under = Math.max(...places.map((place) => place.y + place.height)) + GAP;
  /** @type {{x: number, y: number, colour: string, text: string}[]} */
  const entries = [];
  let [x, y] = [GAP, under];
  for (const entry of legend()) {
    const wide = 24 + 7 * entry.text.length;
    if (x + wide > width && x > GAP) [x, y] = [GAP, y + ROW];
    entries.push({ x, y, ...entry });
    x += wide;
  }
  const height = y + (entries.length ? ROW : 0) + ROW + GAP / 2;
  const { summary } = state.scenes[0];
  const runs = state.scenes.map((scene) => scene.label).join(", ");
  const slice = summary.slices > 1 ? `, slice ${state.slice + 1} of ${summary.slices}` : "";
  const { low, high } = state.window;
  const range = `shown from ${Number(low.toPrecision(4))} to ${Number(high.toPrecision(4))}${summary.units ? ` ${summary.units}` : ""}`;
  const line = `${summary.name}${slice}; ${runs}; ${range}; contours of ${summary.classes[state.cls]}`;
  return { places, width, height, entries, line };
}

/** @returns {Promise<Blob>} */
export async function png() {
  const { places, width, height, entries, line } = layout();
  const ratio = Math.max(2, window.devicePixelRatio || 1);
  const canvas = canvasOf(Math.round(width * ratio), Math.round(height * ratio));
  const to = context(canvas);
  to.scale(ratio, ratio);
  to.fillStyle = "#ffffff";
  to.fillRect(0, 0, width, height);
  to.font = "13px system-ui, sans-serif";
  to.textBaseline = "middle";
  panels.forEach(({ scene, kind }, i) => {
    const place = places[i];
    to.fillStyle = "#1c2530";
    to.fillText(titleOf(scene, kind), place.x, place.y - TITLE / 2);
    to.save();
    to.translate(place.x, place.y);
    paint(to, scene, kind, place.width, place.height);
    to.restore();
  });
  for (const { x, y, colour, text } of entries) {
    to.fillStyle = colour;
    to.fillRect(x, y + 4, 12, 12);
    to.strokeStyle = "#5a6675";
    to.strokeRect(x + 0.5, y + 4.5, 11, 11);
    to.fillStyle = "#1c2530";
    to.fillText(text, x + 17, y + ROW / 2);
  }
  to.fillStyle = "#5a6675";
  to.font = "11px system-ui, sans-serif";
  to.fillText(line, GAP, height - ROW / 2 - 2);
  return new Promise((done, failed) => canvas.toBlob((blob) => (blob ? done(blob) : failed(Error("no PNG"))), "image/png"));
}

/** @param {string} text */
function escaped(text) {
  return text.replace(/[&<>"]/g, (one) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[one] ?? one);
}

/** The panels with the contours as paths that a drawing program can change. */
export function svg() {
  const { places, width, height, entries, line } = layout();
  const parts = [
    `<svg xmlns="http://www.w3.org/2000/svg" width="${width}" height="${height}" viewBox="0 0 ${width} ${height}" font-family="sans-serif" font-size="13">`,
    `<rect width="100%" height="100%" fill="#ffffff"/>`,
  ];
  panels.forEach(({ scene, kind }, i) => {
    const place = places[i];
    const slice = state.scenes[scene] && sliceOf(state.scenes[scene]);
    if (!slice) return;
    const { scale, x, y } = placed(slice, place.width, place.height);
    parts.push(`<text x="${place.x}" y="${place.y - 7}" fill="#1c2530">${escaped(titleOf(scene, kind))}</text>`);
    parts.push(`<svg x="${place.x}" y="${place.y}" width="${place.width}" height="${place.height}">`);
    parts.push(`<rect width="100%" height="100%" fill="#0d1117"/>`);
    parts.push(`<g transform="translate(${x} ${y}) scale(${scale})">`);
    for (const { canvas, opacity } of layers(scene, slice, kind)) {
      const style = `opacity="${opacity}" style="image-rendering:pixelated"`;
      parts.push(`<image width="${slice.w}" height="${slice.h * slice.tall}" preserveAspectRatio="none" ${style} href="${canvas.toDataURL()}"/>`);
    }
    for (const { d, colour, width: thick, dash, fill } of lines(scene, slice, kind)) {
      const dashed = dash ? ` stroke-dasharray="${6 / scale} ${3 / scale}"` : "";
      const paints = `fill="${colour}" fill-opacity="${fill}" stroke="${colour}" stroke-width="${thick / scale}"${dashed}`;
      parts.push(`<path d="${d}" ${paints} stroke-linejoin="round"/>`);
    }
    parts.push("</g></svg>");
  });
  for (const { x, y, colour, text } of entries) {
    parts.push(`<rect x="${x}" y="${y + 4}" width="12" height="12" fill="${colour}" stroke="#5a6675"/>`);
    parts.push(`<text x="${x + 17}" y="${y + 14}" fill="#1c2530">${escaped(text)}</text>`);
  }
  parts.push(`<text x="${GAP}" y="${height - 8}" font-size="11" fill="#5a6675">${escaped(line)}</text></svg>`);
  return parts.join("\n");
}

/** @param {"png" | "svg"} kind */
export async function savePicture(kind) {
  if (!state.scenes.length) {
    complain("there is no image on the screen to save");
    return;
  }
  if (kind === "png") offer(await png(), named("png"));
  else offer(new Blob([svg()], { type: "image/svg+xml" }), named("svg"));
}

/** @param {string} format */
function saveMasks(format) {
  if (!state.scenes.length) {
    complain("there are no masks to save");
    return;
  }
  for (const { id } of state.scenes) element("a", { href: `/v1/predictions/${id}/files?format=${format}`, download: "" }).click();
}

export function start() {
  const menu = find("#save", HTMLDetailsElement);
  for (const button of menu.querySelectorAll("button"))
    button.addEventListener("click", () => {
      const what = button.dataset.save ?? "";
      menu.open = false;
      if (what === "png" || what === "svg") void savePicture(what);
      else saveMasks(what.replace("masks-", ""));
    });
  document.addEventListener("click", (event) => {
    if (event.target instanceof Node && !menu.contains(event.target)) menu.open = false;
  });
}
