// The live page: follows the gateway's stream and draws each scene once.

import { Charts } from "prfaas/charts";
import { Details } from "prfaas/details";
import { html, oncePerFrame, setAttribute, setText } from "prfaas/dom";
import * as format from "prfaas/format";
import { Layout } from "prfaas/layout";
import { SceneMap } from "prfaas/map";
import { Overview } from "prfaas/overview";
import { PromptBox } from "prfaas/prompt";
import { RequestTable } from "prfaas/requests";
import { keyOf, markedBy, selectionOf } from "prfaas/selection";
import { completeRequest, Store } from "prfaas/store";
import { Timeline } from "prfaas/timeline";
import * as words from "prfaas/words";

const STREAM = "console/stream";
const SILENT_S = 6; // the gateway sends a scene each second while a page watches
const RETRY_S = 2;

async function loadRequest(id) {
  const response = await fetch(`console/requests/${encodeURIComponent(id)}`);
  if (response.status === 404) throw new Error("The gateway no longer has this request.");
  if (!response.ok) throw new Error(`The gateway answered with status ${response.status}.`);
  const loaded = await response.json();
  return { ...loaded, request: loaded.request ? completeRequest(loaded.request) : null };
}

/** The status that the stream would have; 0 where no response comes. */
async function streamStatus() {
  try {
    return (await fetch(STREAM, { method: "HEAD" })).status;
  } catch {
    return 0;
  }
}

class LivePage {
  constructor() {
    this.store = new Store();
    this.heardAt = null; // the page's own time of the latest message
    this.spoken = null; // the scene about which the status line has spoken last
    const onSelect = (selection) => this.store.select(selection);
    const formatTime = format.timeOfDay;
    this.overview = new Overview(onSelect);
    this.map = new SceneMap(onSelect);
    this.charts = new Charts({ formatTime });
    this.timeline = new Timeline({
      formatTime,
      onSelect: (event) => onSelect(selectionOf(event.where, this.store.scene)),
    });
    this.details = new Details(this.store, { formatTime, loadRequest });
    this.prompt = new PromptBox({ loadRequest, onSelect });
    this.table = new RequestTable({ onSelect, formatTime });
    this.layout = new Layout({
      title: "prfaas",
      top: [this.overview.element],
      left: [this.map.element, this.charts.element, this.timeline.element],
      right: [this.details.element, this.prompt.element, this.table.element],
    });
    this.logout = html(
      "form",
      { method: "post", action: "console/logout", hidden: true },
      html("button", { type: "submit" }, "Log out"),
    );
    this.layout.actions.append(this.logout);
    this.store.subscribe(oncePerFrame(() => this.draw()));
  }

  draw() {
    const { store } = this;
    const { scene } = store;
    if (scene === null) return;
    const marked = markedBy(store.selection, store.requests, scene);
    const isMarked = (about, id) => marked.has(keyOf({ about, id }));
    this.layout.describe([scene.model, `policy ${scene.policy}`, ...scene.gateways].join(" · "));
    this.overview.draw(scene, store.history.samples);
    this.map.draw(scene, isMarked);
    this.charts.draw(store.history.samples, store.history.span);
    const [from, to] = store.history.span;
    // Events from before the page was opened are worth more than an empty time line.
    const first = store.events[0]?.at_s ?? from;
    this.timeline.draw({
      events: store.events,
      from: Math.max(to - 600, Math.min(from, first)),
      to,
    });
    this.table.draw(store.requests, isMarked);
    this.prompt.drawTenants(store.tenants);
    this.details.draw();
    this.layout.say(words.changes(this.spoken, scene));
    this.spoken = scene;
    this.layout.mark(scene.at_s);
  }

  // -- the stream

  start() {
    setText(this.layout.connection, "connecting");
    setAttribute(this.layout.connection, "hidden", false);
    this.connect();
  }

  connect() {
    const source = new EventSource(STREAM);
    source.addEventListener("scene", (event) => {
      const message = JSON.parse(event.data);
      setAttribute(this.logout, "hidden", message.login !== true);
      this.heard();
      this.store.replace(message);
    });
    source.addEventListener("delta", (event) => {
      this.heard();
      this.store.apply(JSON.parse(event.data));
    });
    source.addEventListener("error", () => {
      this.tell("stale", this.silenceWords());
      // The browser reconnects by itself, except after a response that is not a stream.
      if (source.readyState === EventSource.CLOSED) this.reconnect();
    });
  }

  async reconnect() {
    const status = await streamStatus();
    if (status === 401) {
      this.tell("ended", "The session has ended. Reload the page to log in.");
      return;
    }
    setTimeout(() => this.connect(), RETRY_S * 1000);
  }

  heard() {
    this.heardAt = Date.now() / 1000;
    this.tell("live", "live");
    clearTimeout(this.silence);
    this.silence = setTimeout(() => this.tell("stale", this.silenceWords()), SILENT_S * 1000);
  }

  silenceWords() {
    if (this.heardAt === null) return "The gateway does not answer; the page tries again.";
    const since = format.timeOfDay(this.heardAt);
    return `The gateway does not answer since ${since}; the page shows its last report.`;
  }

  tell(state, text) {
    const { main, connection } = this.layout;
    if (main.getAttribute("data-live") === "ended") return;
    const was = main.getAttribute("data-live");
    setAttribute(main, "data-live", state);
    setAttribute(connection, "data-live", state);
    setAttribute(connection, "hidden", false);
    setText(connection, text);
    const silence = state === "live" ? "" : text;
    if (this.overview.silence !== silence) {
      this.overview.silence = silence;
      this.draw();
    }
    if (was !== null && was !== state)
      this.layout.say([state === "live" ? "The gateway answers again." : text]);
  }
}

const page = new LivePage();
page.start();
