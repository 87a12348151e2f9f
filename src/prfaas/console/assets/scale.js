// From values to places on a chart: scales, ticks, paths. Pure.

const STEPS = [1, 2, 2.5, 5, 10];
const TIME_STEPS = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400,
];

/** The place of a value of `from`..`to` between `start` and `end`. */
export function linear(from, to, start, end) {
  const span = to - from || 1;
  return (value) => start + ((value - from) / span) * (end - start);
}

/** Round values from 0 to at least `highest`, about `number` of them. */
export function valueTicks(highest, number = 3) {
  if (!(highest > 0)) return [0, 1];
  const rough = highest / number;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = STEPS.find((factor) => factor * power >= rough * 0.999) * power;
  const ticks = [];
  // Multiplied, not added up: 0.1 added three times is not 0.3.
  for (let index = 0; index === 0 || ticks.at(-1) < highest * 0.999; index += 1) {
    ticks.push(Number((index * step).toPrecision(12)));
  }
  return ticks;
}

/** Seconds by which the reader's clock is ahead of UTC at a time. */
export function zoneAt(epochSeconds) {
  return -new Date(epochSeconds * 1000).getTimezoneOffset() * 60;
}

/** The anchor of a label at `x`: the first and the last one would stick out of the drawing. */
export function anchorAt(x, left, right) {
  if (x < left + 24) return "start";
  return x > right - 28 ? "end" : "middle";
}

/** Round times within `from`..`to`, at most `most`. `offset` is the time zone, in seconds. */
export function timeTicks(from, to, most = 5, offset = 0) {
  const step = TIME_STEPS.find((seconds) => (to - from) / seconds <= most) ?? TIME_STEPS.at(-1);
  const ticks = [];
  for (let at = Math.ceil((from + offset) / step) * step - offset; at <= to; at += step) {
    ticks.push(at);
  }
  return ticks;
}

/** About `number` round values among a parameter's; near powers of ten on a logarithmic axis. */
export function parameterTicks(values, isLog, number) {
  const from = Math.min(...values.filter((value) => !isLog || value > 0));
  const to = Math.max(...values);
  if (!isLog) {
    const step = valueTicks(to - from, number)[1];
    const ticks = [];
    for (let rank = Math.ceil(from / step); rank * step <= to; rank += 1) {
      ticks.push(Number((rank * step).toPrecision(12)));
    }
    return ticks;
  }
  const ticks = [];
  for (let power = Math.floor(Math.log10(from)); 10 ** power <= to; power += 1) {
    for (const factor of to / from > 1000 ? [1] : [1, 3]) {
      const value = factor * 10 ** power;
      if (value >= from && value <= to) ticks.push(value);
    }
  }
  return ticks;
}

const place = (value) => value.toFixed(1);

/** The `d` of a line through [x, y] points; a null y interrupts it. */
export function linePath(points) {
  let path = "";
  let drawing = false;
  for (const [x, y] of points) {
    if (y === null) {
      drawing = false;
      continue;
    }
    path += `${drawing ? "L" : "M"}${place(x)} ${place(y)}`;
    drawing = true;
  }
  return path;
}

/** The `d` of the areas between an upper and a lower line with the same x; a null interrupts. */
export function areaPath(upper, lower) {
  let path = "";
  let start = -1;
  for (let index = 0; index <= upper.length; index += 1) {
    const present = index < upper.length && upper[index][1] !== null && lower[index][1] !== null;
    if (present && start < 0) start = index;
    if (present || start < 0) continue;
    const back = lower.slice(start, index).reverse();
    path += `${linePath(upper.slice(start, index))}${linePath(back).replace("M", "L")}Z`;
    start = -1;
  }
  return path;
}

/** Sums of the series up to and including each; null where any of them is null. */
export function stacked(series) {
  const sums = [];
  let below = null;
  for (const points of series) {
    const sum = points.map(([at, value], index) => {
      const base = below === null ? 0 : below[index][1];
      return [at, value === null || base === null ? null : base + value];
    });
    sums.push(sum);
    below = sum;
  }
  return sums;
}

/** At most `most` points: of each bucket the last one, so that the newest value is kept. */
export function thinned(points, most) {
  if (points.length <= most) return points;
  const every = points.length / most;
  const kept = [];
  for (let index = 1; index <= most; index += 1) kept.push(points[Math.round(index * every) - 1]);
  return kept;
}

/** The value of the [at_s, value] point nearest to a time; null where there are none. */
export function valueNear(points, at) {
  if (points.length === 0) return null;
  let low = 0;
  let high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][0] < at) low = middle + 1;
    else high = middle;
  }
  const isEarlier = low > 0 && at - points[low - 1][0] <= points[low][0] - at;
  return points[isEarlier ? low - 1 : low][1];
}

/** The largest value of all points; 0 where there are none. */
export function highest(series) {
  let found = 0;
  for (const points of series) {
    for (const [, value] of points) if (value !== null && value > found) found = value;
  }
  return found;
}
