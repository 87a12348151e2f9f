// What happened: plans, changes of roles, moves, links that are cut, nodes that are lost. As marks
// on a time line, one lane for each kind, and as a list of sentences.

import {
  html,
  KeyedList,
  observeWidth,
  setAttribute,
  setAttributes,
  setText,
  svg,
} from "prfaas/dom";
import * as scale from "prfaas/scale";

const LANES = ["link", "node", "role", "plan", "move", "cluster", "gateway"];
const LANE_HEIGHT = 16;
const EDGE = { left: 58, right: 8, bottom: 18 };
const MOST_LISTED = 40;

export class Timeline {
  /**
   * `formatTime` writes a time. `onPick(at_s)`: in a replay, a click moves there.
   * `onSelect(event)`: an event of the list was activated.
   */
  constructor({ formatTime, onPick = null, onSelect, zone = null }) {
    this.formatTime = formatTime;
    this.zone = zone; // as in `Chart`
    this.width = 0;
    this.drawn = null;
    this.laneLabels = svg("g", { class: "lanes" });
    this.marks = svg("g", {});
    this.axis = svg("g", { class: "grid" });
    this.window = svg("rect", { class: "window", y: 0 });
    this.cursor = svg("line", { class: "cursor", y1: 0 });
    // A screen reader reads the list instead, which says the same.
    this.drawing = svg(
      "svg",
      { class: "timeline-drawing", width: "100%", "aria-hidden": "true" },
      this.window,
      this.laneLabels,
      this.axis,
      this.marks,
      this.cursor,
    );
    this.list = html("ol", {
      class: "events",
      tabindex: "0",
      "aria-label": "Events, the latest first",
    });
    this.empty = html(
      "p",
      { class: "hint" },
      "Plans, changes of roles, moves and faults appear here.",
    );
    this.element = html(
      "section",
      { class: "timeline", "aria-labelledby": "timeline-title" },
      html("h2", { id: "timeline-title" }, "What happened"),
      this.drawing,
      this.empty,
      this.list,
    );
    this.buildLists(onSelect);
    if (onPick !== null)
      this.drawing.addEventListener("click", (event) => onPick(this.timeAt(event.offsetX)));
    observeWidth(this.drawing, (width) => {
      this.width = width;
      if (this.drawn !== null) this.draw(this.drawn);
    });
  }

  buildLists(onSelect) {
    this.lanes = new KeyedList(
      this.laneLabels,
      () => svg("g", {}, svg("text", { x: 0 }), svg("line", { x1: EDGE.left })),
      (group, lane) => {
        setText(group.firstChild, lane.kind);
        setAttribute(group.firstChild, "y", lane.y + 4);
        setAttributes(group.lastChild, { x2: this.width - EDGE.right, y1: lane.y, y2: lane.y });
      },
    );
    this.dots = new KeyedList(
      this.marks,
      (event) =>
        svg("circle", { r: 4.5, class: `mark mark-${event.kind}` }, svg("title", {}, event.text)),
      (dot, event) => setAttributes(dot, { cx: event.x.toFixed(1), cy: event.y }),
    );
    this.ticks = new KeyedList(
      this.axis,
      () => svg("text", {}),
      (text, tick) => {
        const anchor = scale.anchorAt(tick.x, EDGE.left, this.width);
        setAttributes(text, { x: tick.x, y: tick.y, "text-anchor": anchor });
        setText(text, tick.label);
      },
    );
    this.items = new KeyedList(
      this.list,
      (event) =>
        html(
          "li",
          { "data-event": event.id, "data-kind": event.kind },
          html("time", {}, this.formatTime(event.at_s)),
          html("span", { class: `kind mark-${event.kind}` }, event.kind),
          html(
            "button",
            { type: "button", class: "plain", on: { click: () => onSelect(event) } },
            event.text,
          ),
        ),
      (item, event) => setAttribute(item, "data-later", event.later),
    );
  }

  timeAt(x) {
    const { from, to } = this.drawn;
    return scale.linear(EDGE.left, this.width - EDGE.right, from, to)(x);
  }

  /** `marked`: an interval to shade, such as the measured window of a run. */
  draw({ events, from, to, cursor = null, marked = null }) {
    this.drawn = { events, from, to, cursor, marked };
    setAttribute(this.empty, "hidden", events.length > 0);
    const passed = cursor === null ? events : events.filter((event) => event.at_s <= cursor);
    this.items.draw(passed.slice(-MOST_LISTED).reverse(), (event) => event.id);
    if (this.width === 0) return;
    const shown = events.filter((event) => event.at_s >= from && event.at_s <= to);
    const kinds = LANES.filter((kind) => shown.some((event) => event.kind === kind));
    const height = Math.max(1, kinds.length) * LANE_HEIGHT + EDGE.bottom;
    setAttribute(this.drawing, "height", height);
    const x = scale.linear(from, to, EDGE.left, this.width - EDGE.right);
    const laneY = (kind) => kinds.indexOf(kind) * LANE_HEIGHT + LANE_HEIGHT / 2;
    this.lanes.draw(
      kinds.map((kind) => ({ kind, y: laneY(kind) })),
      (lane) => lane.kind,
    );
    this.dots.draw(
      shown.map((event) => ({ ...event, x: x(event.at_s), y: laneY(event.kind) })),
      (event) => event.id,
    );
    this.drawAxis(from, to, x, height);
    this.drawMarked(marked, cursor, x, height);
  }

  drawAxis(from, to, x, height) {
    const zone = this.zone ?? scale.zoneAt(to);
    const most = Math.max(2, Math.floor(this.width / 100));
    const ticks = scale
      .timeTicks(from, to, most, zone)
      .map((at, rank) => ({ rank, x: x(at), y: height - 4, label: this.formatTime(at) }));
    this.ticks.draw(ticks, (tick) => tick.rank);
  }

  drawMarked(marked, cursor, x, height) {
    setAttribute(this.window, "visibility", marked === null ? "hidden" : "visible");
    if (marked !== null) {
      const [start, end] = marked.map(x);
      setAttributes(this.window, {
        x: start,
        width: Math.max(0, end - start),
        height: height - EDGE.bottom,
      });
    }
    setAttribute(this.cursor, "visibility", cursor === null ? "hidden" : "visible");
    if (cursor !== null)
      setAttributes(this.cursor, { x1: x(cursor), x2: x(cursor), y2: height - EDGE.bottom });
  }
}
