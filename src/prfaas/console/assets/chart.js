// One chart: lines or stacked areas over time, with axes, a legend and its values in words.
//
// A chart is drawn with `draw({series, from, to, cursor})`. A series is
// {name, tone, points: [[at_s, value | null], ...], dashed}; `tone` names a colour of console.css.

import {
  html,
  KeyedList,
  observeWidth,
  setAttribute,
  setAttributes,
  setText,
  svg,
} from "prfaas/dom";
import { rounded } from "prfaas/format";
import * as scale from "prfaas/scale";

const HEIGHT = 128;
const EDGE = { left: 54, right: 8, top: 8, bottom: 18 };
const MOST_POINTS = 640; // ten minutes of a live page, or all frames of a run

export class Chart {
  /**
   * `kind`: "line" or "stack". `headline`: the number beside the title, "first" series, "sum" of
   * all, or "none". `format` writes a value. `formatTime` writes a time of the axis.
   * `top`: a fixed end of the scale. `onPick(at_s)`: called on a click, where given. `zone`:
   * seconds by which round times are shifted; null: the reader's time zone.
   */
  constructor({
    id,
    title,
    kind = "line",
    format,
    formatTime,
    top = null,
    headline = "first",
    note = "",
    onPick = null,
    zone = null,
  }) {
    this.kind = kind;
    this.format = format;
    this.formatTime = formatTime;
    this.top = top;
    this.zone = zone;
    this.headline = headline;
    this.title = title;
    this.width = 0;
    this.drawn = null;
    this.hovered = null;
    this.build(id, note, onPick);
  }

  build(id, note, onPick) {
    this.value = html("span", { class: "chart-value" });
    this.legend = html("ul", { class: "legend" });
    this.legendItems = new KeyedList(
      this.legend,
      () => html("li", {}, html("span", { class: "swatch" }), html("span", {}), html("b", {})),
      (item, series) => this.drawLegend(item, series),
    );
    this.lines = svg("g", {});
    this.paths = new KeyedList(
      this.lines,
      () => svg("path", {}),
      (path, given) => setAttributes(path, { d: given.d, class: given.class }),
    );
    this.grid = svg("g", { class: "grid" });
    this.ticks = new KeyedList(
      this.grid,
      () => svg("g", {}, svg("line", {}), svg("text", {})),
      (group, tick) => {
        setAttributes(group.firstChild, tick.line);
        setAttributes(group.lastChild, tick.text);
        setText(group.lastChild, tick.label);
      },
    );
    this.cursor = svg("line", { class: "cursor", y1: EDGE.top, y2: HEIGHT - EDGE.bottom });
    this.drawing = svg(
      "svg",
      { class: "chart-drawing", role: "img", height: HEIGHT, width: "100%" },
      this.grid,
      this.lines,
      this.cursor,
    );
    this.element = html(
      "figure",
      { class: "chart", "data-chart": id },
      html(
        "figcaption",
        {},
        html("span", { class: "chart-title", title: note || null }, this.title),
        this.value,
      ),
      this.drawing,
      this.legend,
    );
    this.drawing.addEventListener("pointermove", (event) => this.hover(event.offsetX));
    this.drawing.addEventListener("pointerleave", () => this.hover(null));
    if (onPick !== null) {
      this.drawing.addEventListener("click", (event) => onPick(this.timeAt(event.offsetX)));
    }
    observeWidth(this.drawing, (width) => {
      this.width = width;
      if (this.drawn !== null) this.draw(this.drawn);
    });
  }

  timeAt(x) {
    const { from, to } = this.drawn;
    return scale.linear(EDGE.left, this.width - EDGE.right, from, to)(x);
  }

  hover(x) {
    if (this.drawn === null) return;
    this.hovered = x === null ? null : this.timeAt(x);
    this.draw(this.drawn);
  }

  /** `cursor`: a time to mark; in a replay, the time that the map shows. */
  draw({ series, from, to, cursor = null }) {
    const { drawn, width } = this;
    const isSame =
      drawn?.series === series && drawn.from === from && drawn.to === to && drawn.width === width;
    this.drawn = { series, from, to, cursor, width };
    if (width === 0) return; // not laid out yet; the observer draws again
    if (!isSame) this.drawLines(series, from, to);
    this.at = this.hovered ?? cursor;
    setAttribute(this.cursor, "visibility", this.at === null ? "hidden" : "visible");
    if (this.at !== null) {
      const x = scale
        .linear(
          from,
          to,
          EDGE.left,
          width - EDGE.right,
        )(this.at)
        .toFixed(1);
      setAttributes(this.cursor, { x1: x, x2: x });
    }
    this.legendItems.draw(series, (one) => one.name);
    this.describe(series);
  }

  drawLines(series, from, to) {
    const shown = series.map((one) => ({ ...one, points: scale.thinned(one.points, MOST_POINTS) }));
    const values = shown.map((one) => one.points);
    const sums = this.kind === "stack" ? scale.stacked(values) : values;
    const ticks = scale.valueTicks(this.top ?? scale.highest(sums));
    const x = scale.linear(from, to, EDGE.left, this.width - EDGE.right);
    const y = scale.linear(0, ticks.at(-1), HEIGHT - EDGE.bottom, EDGE.top);
    this.ticks.draw(
      [...this.valueTicks(ticks, y), ...this.timeTicks(from, to, x)],
      (tick) => tick.key,
    );
    this.paths.draw(this.pathsOf(shown, sums, from, x, y), (path) => path.key);
  }

  pathsOf(shown, sums, from, x, y) {
    const placed = sums.map((points) =>
      points
        .filter(([at]) => at >= from)
        .map(([at, value]) => [x(at), value === null ? null : y(value)]),
    );
    return placed.map((points, index) => {
      const { name, tone, dashed } = shown[index];
      if (this.kind === "stack") {
        const lower = index > 0 ? placed[index - 1] : points.map(([at]) => [at, y(0)]);
        return { key: name, d: scale.areaPath(points, lower), class: `area tone-${tone}` };
      }
      return {
        key: name,
        d: scale.linePath(points),
        class: `line tone-${tone}${dashed ? " dashed" : ""}`,
      };
    });
  }

  valueTicks(ticks, y) {
    return ticks.map((value, rank) => ({
      key: `value ${rank}`,
      line: { x1: EDGE.left, x2: this.width - EDGE.right, y1: y(value), y2: y(value) },
      text: { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" },
      label: rounded(this.format(value)),
    }));
  }

  timeTicks(from, to, x) {
    const zone = this.zone ?? scale.zoneAt(to);
    const most = Math.max(3, Math.floor(this.width / 80));
    return scale.timeTicks(from, to, most, zone).map((at, rank) => {
      const place = x(at);
      const anchor = scale.anchorAt(place, EDGE.left, this.width);
      return {
        key: `time ${rank}`,
        line: { x1: place, x2: place, y1: HEIGHT - EDGE.bottom, y2: HEIGHT - EDGE.bottom + 3 },
        text: { x: place, y: HEIGHT - 3, "text-anchor": anchor },
        label: this.formatTime(at),
      };
    });
  }

  /** The value at the cursor, or the latest one. */
  valueOf({ points }) {
    return scale.valueNear(points, this.at ?? Infinity);
  }

  drawLegend(item, series) {
    const [swatch, name, value] = item.children;
    setAttribute(swatch, "class", `swatch tone-${series.tone}${series.dashed ? " dashed" : ""}`);
    setText(name, series.name);
    const found = this.valueOf(series);
    setText(value, found === null ? "-" : this.format(found));
  }

  describe(series) {
    const values = series.map((one) => this.valueOf(one));
    setText(this.value, this.headlineOf(values));
    const parts = series.map(
      (one, index) =>
        `${one.name} ${values[index] === null ? "unknown" : this.format(values[index])}`,
    );
    setAttribute(
      this.drawing,
      "aria-label",
      `${this.title}: ${parts.join(", ") || "no data yet"}.`,
    );
  }

  headlineOf(values) {
    if (this.headline === "none") return "";
    const known = (this.headline === "first" ? values.slice(0, 1) : values).filter(
      (value) => value !== null,
    );
    if (known.length === 0) return "-";
    return this.format(known.reduce((one, other) => one + other, 0));
  }
}
