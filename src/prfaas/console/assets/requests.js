// The table of the latest requests. At a hundred requests per second rows would run away under the
// pointer, so the table stands still while the pointer or the focus is in it, and says so.

import { drawSplitBar, splitBar, sumOfParts } from "prfaas/bars";
import { html, KeyedList, setAttribute, setAttributes, setText } from "prfaas/dom";
import * as format from "prfaas/format";

const MOST_ROWS = 30;
const COLUMNS = ["arrived", "route", "prompt", "cached", "TTFT", "its parts"];
const FILTERS = {
  all: () => true,
  offloaded: (request) => request.route === "remote",
  local: (request) => request.route !== "remote" && request.route !== "none",
  "not completed": (request) => !["completed", "in progress"].includes(request.outcome),
};

/** The rows to show: those that the filter lets through, at most `most`. Pure. */
export function chosenRequests(requests, filter, most = MOST_ROWS) {
  const passes = FILTERS[filter];
  const chosen = [];
  for (const request of requests) {
    if (passes(request)) chosen.push(request);
    if (chosen.length === most) break;
  }
  return chosen;
}

export class RequestTable {
  /** `onSelect({about: "request", id})`; `formatTime` writes the arrival. */
  constructor({ onSelect, formatTime, title = "Latest requests" }) {
    this.formatTime = formatTime;
    this.isHeld = false;
    this.requests = [];
    this.filter = html(
      "select",
      { id: "request-filter", on: { change: () => this.drawRows() } },
      Object.keys(FILTERS).map((name) => html("option", { value: name }, name)),
    );
    this.held = html("span", { class: "hint", hidden: true }, "stands still while you point at it");
    this.note = html("p", { class: "hint" }, "No request yet.");
    const body = html("tbody", {});
    this.rows = new KeyedList(
      body,
      (request) => createRow(request, onSelect),
      (row, request) => this.drawRow(row, request),
    );
    const table = html(
      "table",
      { class: "requests" },
      html(
        "thead",
        {},
        html(
          "tr",
          {},
          COLUMNS.map((name) => html("th", { scope: "col" }, name)),
        ),
      ),
      body,
    );
    for (const event of ["pointerenter", "focusin"])
      table.addEventListener(event, () => this.hold(true));
    table.addEventListener("pointerleave", () => this.hold(table.contains(document.activeElement)));
    table.addEventListener("focusout", (event) =>
      this.hold(table.contains(event.relatedTarget) || table.matches(":hover")),
    );
    this.element = html(
      "section",
      { class: "request-section", "aria-labelledby": "requests-title" },
      html(
        "div",
        { class: "section-head" },
        html("h2", { id: "requests-title" }, title),
        this.held,
        html("label", { for: "request-filter", class: "visually-hidden" }, "Show"),
        this.filter,
      ),
      html("div", { class: "table-scroll" }, table),
      this.note,
    );
  }

  hold(isHeld) {
    this.isHeld = isHeld;
    setAttribute(this.held, "hidden", !isHeld || this.rows.elements.size === 0);
    if (!isHeld) this.drawRows();
  }

  draw(requests, isMarked) {
    const changed = this.requests !== requests;
    this.isMarked = isMarked;
    this.requests = requests;
    // The marks follow the selection at once; new rows wait while the table is held.
    if (changed && !this.isHeld) this.drawRows();
    else for (const row of this.rows.elements.values()) this.mark(row);
  }

  drawRows() {
    const chosen = chosenRequests(this.requests, this.filter.value);
    this.longest = Math.max(...chosen.map(sumOfParts), 0);
    setAttribute(this.note, "hidden", chosen.length > 0);
    this.rows.draw(chosen, (request) => request.id);
  }

  drawRow(row, request) {
    this.mark(row);
    if (row.drawn === request && row.longest === this.longest) return;
    row.drawn = request;
    row.longest = this.longest;
    const [arrived, route, prompt, cached, ttft, split] = row.children;
    setAttributes(row, { "data-route": request.route, "data-outcome": request.outcome });
    const button = arrived.firstElementChild;
    const time = this.formatTime(request.at_s);
    setText(button, time);
    const name = `Request ${request.id} at ${time}, ${request.route}, ${request.outcome}`;
    setAttribute(button, "aria-label", name);
    const [routeName, outcome] = route.children;
    setText(routeName, request.route === "remote" ? "offloaded" : request.route);
    setAttribute(routeName, "data-route-name", request.route);
    setText(outcome, ["completed", "in progress"].includes(request.outcome) ? "" : request.outcome);
    setText(prompt, format.short(request.prompt_tokens));
    setText(
      cached,
      request.prompt_tokens > 0
        ? format.percent(request.cached_tokens / request.prompt_tokens)
        : "-",
    );
    setText(ttft, request.ttft_s === null ? "-" : format.duration(request.ttft_s));
    drawSplitBar(split.firstElementChild, request, this.longest);
  }

  mark(row) {
    const marked = this.isMarked?.("request", row.dataset.request) ?? false;
    setAttribute(row, "data-marked", marked);
  }
}

function createRow(request, onSelect) {
  const select = () => onSelect({ about: "request", id: request.id });
  return html(
    "tr",
    { "data-request": request.id, on: { click: select } },
    // The row takes the pointer, and the button in it the keyboard; Enter must not select twice.
    html("td", {}, html("button", { type: "button", class: "plain" })),
    html("td", {}, html("span", { class: "route" }), html("span", { class: "outcome" })),
    html("td", { class: "number" }),
    html("td", { class: "number" }),
    html("td", { class: "number" }),
    html("td", {}, splitBar()),
  );
}
