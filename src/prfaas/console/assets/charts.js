// The charts of the page: which series they have, and from which numbers of the history.

import { Chart } from "prfaas/chart";
import { html } from "prfaas/dom";
import * as format from "prfaas/format";
import * as history from "prfaas/history";

const MOST_LINES = 6; // of links or homes: more lines than colours would not be told apart

/** Names with the highest values first; at most as many as a chart can show. */
function mostUsed(samples, read) {
  const totals = new Map();
  for (const sample of samples) {
    for (const [name, value] of Object.entries(read(sample))) {
      totals.set(name, (totals.get(name) ?? 0) + value);
    }
  }
  const names = [...totals.keys()].sort((one, other) => totals.get(other) - totals.get(one));
  // The order of drawing, and so the colours, follow the names: they stay when the rates change.
  return names.slice(0, MOST_LINES).sort();
}

function windowSeries(name, tone, measure) {
  return { name, tone, read: (samples, seconds) => history.windowed(samples, measure, seconds) };
}

const FIXED = {
  requests: [
    windowSeries("local", "prefill", history.requestRate("local")),
    windowSeries("offloaded", "transfer", history.requestRate("remote")),
    windowSeries("failed", "bad", history.requestRate("failed")),
  ],
  offloaded: [
    windowSeries("offloaded", "transfer", history.shareOffloaded),
    {
      name: "plan",
      tone: "plan",
      dashed: true,
      read: (samples) => history.direct(samples, (sample) => sample.planned_share),
    },
  ],
  ttft: [
    windowSeries("wait", "wait", history.meanTtft("wait_s")),
    windowSeries("prefill", "prefill", history.meanTtft("prefill_s")),
    windowSeries("transfer", "transfer", history.meanTtft("transfer_s")),
    windowSeries("decode", "decode", history.meanTtft("decode_s")),
  ],
  cache: [
    windowSeries("reused", "decode", history.shareOfPrompts("cached_tokens")),
    windowSeries("lost for want of a state", "warn", history.shareOfPrompts("stateless_tokens")),
  ],
};

/** The series of the threshold: one line per home, and its plan dashed. */
function thresholdSeries(samples) {
  const homes = mostUsed(samples, (sample) =>
    Object.fromEntries(Object.keys(sample.thresholds).map((home) => [home, 1])),
  ).slice(0, 3);
  return homes.flatMap((home, index) => {
    const prefix = homes.length > 1 ? `${home}: ` : "";
    const read = (place) =>
      history.direct(samples, (sample) => sample.thresholds[home]?.[place] ?? null);
    return [
      { name: `${prefix}in force`, tone: `line-${index}`, points: read(0) },
      { name: `${prefix}plan`, tone: `line-${index}`, dashed: true, points: read(1) },
    ];
  });
}

/** One line per link, in bits per second. */
function linkSeries(samples) {
  return mostUsed(samples, (sample) => sample.links).map((name, index) => ({
    name: name.replace(" -> ", " → "),
    tone: `line-${index}`,
    points: history.direct(samples, (sample) => sample.links[name] ?? null),
  }));
}

const CHARTS = [
  {
    id: "links",
    title: "Rate of each link",
    headline: "none",
    format: format.rate,
    note: "Bits per second that arrive; the links with the most traffic.",
    series: linkSeries,
  },
  {
    id: "offloaded",
    title: "Offloaded requests",
    format: format.percent,
    top: 1,
    note: "Share of the requests that another cluster prefilled, over a sliding window.",
  },
  {
    id: "threshold",
    title: "Threshold",
    headline: "none",
    format: format.short,
    note: "Uncached tokens from which a request is offloaded: in force now, and in the plan.",
    series: thresholdSeries,
  },
  {
    id: "ttft",
    title: "Time to first token, mean",
    headline: "sum",
    kind: "stack",
    format: format.duration,
    note: "Mean over the first tokens of a sliding window.",
  },
  {
    id: "requests",
    title: "Requests finished",
    headline: "sum",
    kind: "stack",
    format: format.perSecond,
    note: "Requests per second, over a sliding window.",
  },
  {
    id: "cache",
    title: "Prompt tokens in a cache",
    kind: "stack",
    format: format.percent,
    top: 1,
    note: "Tokens whose blocks are cached without the recurrent state to resume from are lost.",
  },
];

export class Charts {
  /** `formatTime` writes times of the axis. `onPick(at_s)`: in a replay, a click moves there. */
  constructor({ formatTime, onPick = null, windowSeconds = history.WINDOW_S, zone = null }) {
    this.windowSeconds = windowSeconds;
    this.charts = CHARTS.map((given) => ({
      given,
      chart: new Chart({ ...given, formatTime, onPick, zone }),
    }));
    this.element = html(
      "section",
      { class: "charts", "aria-labelledby": "charts-title" },
      html("h2", { id: "charts-title", class: "visually-hidden" }, "Charts"),
      this.charts.map(({ chart }) => chart.element),
    );
  }

  draw(samples, [from, to], cursor = null) {
    // A replay draws the same samples with another cursor, and a selection changes no sample.
    const last = samples.at(-1);
    if (this.samples !== samples || this.last !== last) {
      this.samples = samples;
      this.last = last;
      this.series = this.charts.map(({ given }) => this.seriesOf(given, samples));
    }
    this.charts.forEach(({ chart }, index) => {
      chart.draw({ series: this.series[index], from, to, cursor });
    });
  }

  seriesOf(given, samples) {
    if (given.series !== undefined) return given.series(samples);
    return FIXED[given.id].map(({ read, ...rest }) => ({
      ...rest,
      points: read(samples, this.windowSeconds),
    }));
  }
}
