// The report of a simulation: the same drawing as the live page, with a player instead of a stream.

import { textTable } from "prfaas/bars";
import { Charts } from "prfaas/charts";
import { Details } from "prfaas/details";
import { html, oncePerFrame, replaceChildren, setAttribute } from "prfaas/dom";
import * as format from "prfaas/format";
import { Layout } from "prfaas/layout";
import { SceneMap } from "prfaas/map";
import { Overview } from "prfaas/overview";
import { Player } from "prfaas/player";
import { Replay, windowOf } from "prfaas/replay";
import { RequestTable } from "prfaas/requests";
import { keyOf, markedBy, selectionOf } from "prfaas/selection";
import { Store } from "prfaas/store";
import { Timeline } from "prfaas/timeline";
import * as words from "prfaas/words";

export class SimulationPage {
  constructor(data) {
    this.data = data;
    this.store = new Store();
    this.frame = null; // of the run; null: none is shown yet
    this.drawnScene = null;
    const onSelect = (selection) => this.store.select(selection);
    const formatTime = format.runTime;
    const onPick = (at_s) => this.player.seek(at_s);
    // Runs of one report have about the same length, so one window serves all of them.
    const windowSeconds = windowOf(data.runs[0].times_s);
    this.player = new Player({
      runs: data.runs.map((run) => run.name),
      onMove: (at_s) => this.move(at_s),
      onRun: (index) => this.choose(index),
    });
    this.overview = new Overview(onSelect, windowSeconds);
    this.map = new SceneMap(onSelect);
    this.charts = new Charts({ formatTime, onPick, windowSeconds, zone: 0 });
    this.timeline = new Timeline({
      formatTime,
      onPick,
      zone: 0,
      onSelect: (event) => {
        this.player.seek(event.at_s);
        onSelect(selectionOf(event.where, this.store.scene));
      },
    });
    this.details = new Details(this.store, {
      formatTime,
      zone: 0,
      cursor: () => this.store.scene.at_s,
      loadRequest: (id) => this.loadRequest(id),
    });
    this.table = new RequestTable({ onSelect, formatTime, title: "Sampled requests" });
    this.results = html("section", { class: "results", "aria-label": "Results" });
    this.layout = new Layout({
      title: data.title,
      top: [this.player.element, this.overview.element],
      left: [this.map.element, this.charts.element, this.timeline.element],
      right: [this.details.element, this.results, this.table.element],
    });
    setAttribute(this.layout.main, "data-report", "simulation");
    this.store.subscribe(oncePerFrame(() => this.draw()));
  }

  show() {
    this.choose(0);
    // A run is empty at its beginning and at its end.
    const [from, to] = this.replay.run.window_s ?? this.replay.span;
    this.player.seek((from + to) / 2);
  }

  /** Shows another run at the time that the page shows now. */
  choose(index) {
    const at_s = this.store.scene?.at_s ?? 0;
    const run = this.data.runs[index];
    this.replay = new Replay(run, this.data.model);
    this.store.history = { samples: this.replay.samples, span: this.replay.span };
    this.store.events = run.events;
    this.drawnScene = null;
    this.frame = null;
    this.layout.describe(
      `${this.data.model} · policy ${run.policy} · made by ${this.data.made_by}`,
    );
    this.drawResults(index);
    this.player.setSpan(this.replay.span);
    this.player.seek(Math.min(at_s, this.replay.span[1]));
  }

  move(at_s) {
    const frame = this.replay.frameAt(at_s);
    if (frame === this.frame) return; // the player moves more often than the run has frames
    this.frame = frame;
    this.store.scene = this.replay.sceneAt(this.frame);
    this.store.requests = this.replay.requestsAt(this.store.scene.at_s);
    this.store.changed();
  }

  async loadRequest(id) {
    const request = this.replay.byId.get(id);
    if (request === undefined) throw new Error("This run's sample does not have the request.");
    return { request, explanation: this.replay.explanationOf(request), failures: [] };
  }

  draw() {
    const { store, replay } = this;
    const { scene, history } = store;
    const marked = markedBy(store.selection, replay.requests, scene);
    const isMarked = (about, id) => marked.has(keyOf({ about, id }));
    const [from, to] = replay.span;
    this.overview.draw(scene, history.samples, this.frame);
    this.map.draw(scene, isMarked);
    this.charts.draw(history.samples, replay.span, scene.at_s);
    this.timeline.draw({
      events: store.events,
      from,
      to,
      cursor: scene.at_s,
      marked: replay.run.window_s ?? null,
    });
    this.table.draw(store.requests, isMarked);
    this.details.draw();
    this.layout.say(words.changes(this.drawnScene, scene));
    this.drawnScene = scene;
    this.layout.mark(scene.at_s);
  }

  drawResults(index) {
    const { runs, tables } = this.data;
    const rows = runs[index].summary.map(([label], row) => [
      label,
      ...runs.map((run) => run.summary[row]?.[1] ?? "-"),
    ]);
    const results = textTable({
      title: "Results",
      columns: ["", ...runs.map((run) => run.name)],
      rows,
      current: index + 1,
    });
    const notes = html(
      "ul",
      { class: "notes" },
      (runs[index].notes ?? []).map((note) => html("li", { class: "problem" }, note)),
    );
    const others = [...(runs[index].tables ?? []), ...(tables ?? [])].map(textTable);
    replaceChildren(this.results, notes.children.length > 0 ? notes : null, results, others);
  }
}
