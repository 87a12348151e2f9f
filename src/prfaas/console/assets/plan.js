// The report of a plan: its scene with planned rates, its flows and its curves.

import { textTable } from "prfaas/bars";
import { curveFigure } from "prfaas/curve";
import { Details } from "prfaas/details";
import { html, oncePerFrame, setAttribute } from "prfaas/dom";
import * as format from "prfaas/format";
import { Layout } from "prfaas/layout";
import { SceneMap } from "prfaas/map";
import { keyOf, markedBy, selectionOf } from "prfaas/selection";
import { completeScene, Store } from "prfaas/store";

/** The plan's scene; nodes get their planned utilisation, which the map draws as their load. */
export function plannedScene({ scene, busy }) {
  const complete = completeScene(scene);
  for (const cluster of complete.clusters.values()) {
    for (const node of cluster.nodes.values()) node.busy = busy[cluster.name]?.[node.role] ?? null;
  }
  for (const link of complete.links.values()) link.planned = true;
  return complete;
}

/**
 * The flows as a table of text: a row per PrfaaS cluster, a column per PD cluster. Percentages are
 * of all requests of the PD cluster. Pure.
 */
export function flowTable({ sources, targets, rps, bps, link_bps, local_rps }) {
  const totals = targets.map((_, target) =>
    rps.reduce((sum, row) => sum + (row[target] ?? 0), local_rps[target]),
  );
  const rateWords = (rate, target) =>
    `${format.perSecond(rate)} (${format.percent(totals[target] > 0 ? rate / totals[target] : 0)})`;
  const cell = (source, target) => {
    const rate = rps[source][target];
    if (rate === null) return "no link";
    const bits = format.rateOf(bps[source][target], link_bps[source][target]);
    return `${rateWords(rate, target)}, ${bits}`;
  };
  const each = (write) => targets.map((_, target) => write(target));
  return {
    title: "Where requests are prefilled",
    columns: ["", ...targets.map((name) => `requests of ${name}`)],
    rows: [
      ...sources.map((name, source) => [`at ${name}`, ...each((target) => cell(source, target))]),
      ["at the PD cluster itself", ...each((target) => rateWords(local_rps[target], target))],
    ],
  };
}

/** A table that would be cut off in the narrow column on the right. */
function isWide({ columns }) {
  return columns.length > 4;
}

export class PlanPage {
  constructor(data) {
    this.data = data;
    this.store = new Store();
    this.store.scene = plannedScene(data);
    this.store.history = { samples: [], span: [0, 1] };
    const onSelect = (selection) => this.store.select(selection);
    this.map = new SceneMap(onSelect);
    this.details = new Details(this.store, {
      formatTime: format.runTime,
      loadRequest: () => Promise.reject(new Error("A plan has no requests.")),
    });
    this.layout = new Layout({
      title: data.title,
      top: [this.headline(onSelect)],
      left: [
        this.map.element,
        html("section", { "aria-label": "Flows" }, textTable(flowTable(data.flows))),
        ...this.tables(isWide),
        html("div", { class: "curves" }, data.curves.map(curveFigure)),
      ],
      right: [this.details.element, this.figures(), ...this.tables((table) => !isWide(table))],
    });
    this.layout.describe(`${data.model} · ${data.reading} reading · made by ${data.made_by}`);
    setAttribute(this.layout.main, "data-report", "plan");
    this.store.subscribe(oncePerFrame(() => this.show()));
  }

  show() {
    const { store } = this;
    const marked = markedBy(store.selection, [], store.scene);
    this.map.draw(store.scene, (about, id) => marked.has(keyOf({ about, id })));
    this.details.draw();
    this.layout.mark(store.scene.at_s);
  }

  headline(onSelect) {
    const { data } = this;
    const limits = data.limits.map(({ text, where }) => {
      const selection = selectionOf(where, this.store.scene);
      const attributes =
        selection === null ? {} : { type: "button", on: { click: () => onSelect(selection) } };
      return html(
        "li",
        {},
        html(
          selection === null ? "span" : "button",
          { class: "chip", "data-severity": "warn", ...attributes },
          `limited by ${text}`,
        ),
      );
    });
    return html(
      "section",
      { class: "overview", "aria-label": "Overview" },
      html(
        "div",
        { class: "overview-words" },
        html("p", { class: "statement" }, data.headline),
        html("ul", { class: "problems" }, limits),
      ),
    );
  }

  figures() {
    const notes = this.data.notes.map((note) => html("li", {}, note));
    return html(
      "section",
      { "aria-label": "Figures" },
      textTable({ title: "The plan", columns: ["", ""], rows: this.data.summary }),
      notes.length > 0 ? html("ul", { class: "notes hint" }, notes) : null,
    );
  }

  tables(passes) {
    return this.data.tables
      .filter(passes)
      .map((table) => html("section", { "aria-label": table.title }, textTable(table)));
  }
}
