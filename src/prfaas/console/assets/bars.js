// Small parts that several views share: the bar of TTFT's parts, lists of facts, tables.

import { html, KeyedList, setAttributes, setText, setVariable } from "prfaas/dom";
import * as format from "prfaas/format";

const PARTS = [
  ["wait", "wait_s"],
  ["prefill", "prefill_s"],
  ["transfer", "transfer_s"],
  ["decode", "decode_s"],
];

export function sumOfParts(parts) {
  return PARTS.reduce((sum, [, key]) => sum + Math.max(0, parts[key] ?? 0), 0);
}

function partsInWords(parts) {
  return PARTS.map(([name, key]) => `${name} ${format.duration(parts[key] ?? 0)}`).join(", ");
}

/** A bar of wait, prefill, transfer and decode; `longest` seconds fill it. */
export function splitBar() {
  return html(
    "span",
    { class: "split", role: "img" },
    PARTS.map(([name]) => html("span", { class: `split-part fill-${name}` })),
  );
}

export function drawSplitBar(bar, parts, longest) {
  PARTS.forEach(([, key], index) => {
    const share = longest > 0 ? Math.max(0, parts[key] ?? 0) / longest : 0;
    setVariable(bar.children[index], "--share", Math.min(1, share).toFixed(4));
  });
  setAttributes(bar, { "aria-label": partsInWords(parts), title: partsInWords(parts) });
}

/** The bar with its parts below it, as a list with numbers. */
export function splitWithNumbers(parts) {
  const bar = splitBar();
  drawSplitBar(bar, parts, sumOfParts(parts));
  const entry = ([name, key]) =>
    html(
      "li",
      {},
      html("span", { class: `swatch tone-${name}` }),
      `${name} `,
      html("b", {}, format.duration(parts[key] ?? 0)),
    );
  return html(
    "div",
    { class: "split-block" },
    bar,
    html("ul", { class: "legend" }, PARTS.map(entry)),
  );
}

/** A list of terms and values that can be drawn again; entries without a value are left out. */
export class Facts {
  constructor() {
    this.element = html("dl", { class: "facts" });
    this.entries = new KeyedList(
      this.element,
      ([term]) => html("div", {}, html("dt", {}, term), html("dd", {})),
      (entry, [, value]) => setText(entry.lastElementChild, value),
    );
  }

  draw(entries) {
    const known = entries.filter(
      ([, value]) => value !== null && value !== undefined && value !== "",
    );
    this.entries.draw(known, ([term]) => term);
    return this.element;
  }
}

/** A table of text: the first column is a heading, the others are numbers; `current` is marked. */
export function textTable({ title, columns, rows, current = null }) {
  const mark = (column) => (column === current ? "current" : null);
  const head = columns.map((name, column) =>
    html("th", { scope: "col", class: mark(column) }, name),
  );
  const body = rows.map(([first, ...rest]) =>
    html(
      "tr",
      {},
      html("th", { scope: "row" }, first),
      rest.map((cell, index) => html("td", { class: mark(index + 1) }, cell)),
    ),
  );
  return html(
    "div",
    { class: "table-scroll", tabindex: "0", role: "region", "aria-label": title },
    html(
      "table",
      { class: "figures" },
      html("caption", {}, title),
      html("thead", {}, html("tr", {}, head)),
      html("tbody", {}, body),
    ),
  );
}
