// A chart of curves over a parameter, such as throughput over the threshold. Drawn once.

import { html, observeWidth, replaceChildren, svg } from "prfaas/dom";
import * as format from "prfaas/format";
import * as scale from "prfaas/scale";

const HEIGHT = 220;
const EDGE = { left: 50, right: 14, top: 14, bottom: 36 };

/** x of a value in a chart of this width, on a linear or a logarithmic axis. Pure. */
export function xScale(xs, isLog, width) {
  const known = isLog ? xs.filter((x) => x > 0) : xs;
  const write = isLog ? Math.log : (x) => x;
  const place = scale.linear(
    write(Math.min(...known)),
    write(Math.max(...known)),
    EDGE.left,
    width - EDGE.right,
  );
  return (x) => place(write(x));
}

function bounds(curve) {
  const values = curve.lines.map((line) => line.y.map((y, index) => [curve.x[index], y]));
  return { values, top: curve.y_max ?? scale.highest(values) };
}

export function curveFigure(curve) {
  const drawing = svg("svg", {
    class: "chart-drawing",
    role: "img",
    width: "100%",
    height: HEIGHT,
    "aria-label": describe(curve),
  });
  const legend = curve.lines.map(({ name }, index) =>
    html("li", {}, html("span", { class: `swatch tone-line-${index % 6}` }), name),
  );
  observeWidth(drawing, (width) => replaceChildren(drawing, drawCurve(curve, width)));
  return html(
    "figure",
    { class: "chart" },
    html("figcaption", {}, curve.title),
    drawing,
    html("ul", { class: "legend" }, legend),
  );
}

function describe(curve) {
  const names = curve.lines.map((line) => line.name).join(", ");
  const best = curve.best === null ? "" : ` ${curve.best.text}.`;
  return `${curve.title}: ${curve.y_label} over ${curve.x_label} for ${names}.${best}`;
}

function drawCurve(curve, width) {
  const { values, top } = bounds(curve);
  const ticks = scale.valueTicks(top, 4);
  const x = xScale(curve.x, curve.x_log, width);
  const y = scale.linear(0, ticks.at(-1), HEIGHT - EDGE.bottom, EDGE.top);
  const lines = values.map((points, index) =>
    svg("path", {
      class: `line tone-line-${index % 6}`,
      d: scale.linePath(
        points
          .filter(([at]) => !curve.x_log || at > 0)
          .map(([at, value]) => [x(at), value === null ? null : y(value)]),
      ),
    }),
  );
  // A nested drawing cuts off the lines that leave the axis.
  const inner = svg(
    "svg",
    { x: 0, y: EDGE.top - 4, width, height: HEIGHT - EDGE.bottom - EDGE.top + 6 },
    svg("g", { transform: `translate(0 ${4 - EDGE.top})` }, lines),
  );
  return [
    gridLines(curve, ticks, x, y, width),
    inner,
    curve.best === null ? null : bestMark(curve.best, x, y, width),
  ];
}

function gridLines(curve, ticks, x, y, width) {
  const rows = ticks.flatMap((value) => [
    svg("line", { x1: EDGE.left, x2: width - EDGE.right, y1: y(value), y2: y(value) }),
    svg(
      "text",
      { x: EDGE.left - 6, y: y(value) + 4, "text-anchor": "end" },
      format.rounded(format.short(value)),
    ),
  ]);
  const columns = scale
    .parameterTicks(curve.x, curve.x_log, Math.max(3, Math.floor(width / 90)))
    .map((value) =>
      svg(
        "text",
        { x: x(value), y: HEIGHT - EDGE.bottom + 14, "text-anchor": "middle" },
        format.rounded(format.short(value)),
      ),
    );
  const names = [
    svg("text", { x: width - EDGE.right, y: HEIGHT - 4, "text-anchor": "end" }, curve.x_label),
    svg("text", { x: EDGE.left, y: HEIGHT - 4 }, `vertical: ${curve.y_label}`),
  ];
  return svg("g", { class: "grid" }, rows, columns, names);
}

function bestMark(best, x, y, width) {
  const place = [x(best.x), y(best.y)];
  const isRight = place[0] > width * 0.6;
  return svg(
    "g",
    {},
    svg("circle", { class: "best", cx: place[0], cy: place[1], r: 4.5 }),
    svg(
      "text",
      {
        class: "best-label",
        x: place[0] + (isRight ? -9 : 9),
        y: place[1] - 8,
        "text-anchor": isRight ? "end" : "start",
      },
      best.text,
    ),
  );
}
