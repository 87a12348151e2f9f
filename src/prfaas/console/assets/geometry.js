// Where the boxes, links and labels of the map go. Pure: rectangles in, paths and places out.
//
//     PrfaaS clusters        labels of links        PD clusters
//     ┌───────────┐          ┌────────────┐         ┌──────────┐
//     │           ├──────────┤            ├─────────┤          │
//     └───────────┘          └────────────┘         └──────────┘

export const LABEL_GAP = 8;

/** Clusters on the left and on the right of the map. */
export function columnsOf(clusters) {
  const left = clusters.filter((cluster) => cluster.kind === "prfaas");
  const right = clusters.filter((cluster) => cluster.kind !== "prfaas");
  // PD clusters alone face each other, so that the links between them have room.
  if (left.length === 0 && right.length > 1)
    left.push(...right.splice(0, Math.ceil(right.length / 2)));
  if (right.length === 0) return { left: [], right: left };
  return { left, right };
}

/** The size of a node's cell: the more nodes a cluster has, the smaller. */
export function cellSize(number) {
  if (number <= 10) return "large";
  if (number <= 40) return "medium";
  return number <= 120 ? "small" : "tiny";
}

/**
 * The load of a node, 0 to 1. A decode node is full when its slots are. A prefill node that
 * computes is half full; a wait of 10 s, or 10 queued prefills, fill the rest.
 */
export function loadOf(node) {
  if (node.status === "lost") return 0;
  if (typeof node.busy === "number") return Math.min(1, node.busy); // of a plan
  if (node.role === "prefill") {
    const waits = Math.min(1, Math.max(node.wait_s, node.queued) / 10);
    return (node.active > 0 ? 0.5 : 0) + waits / 2;
  }
  return node.slots > 0 ? Math.min(1, node.active / node.slots) : Math.min(1, node.active / 32);
}

/**
 * Centres of labels in a column, none closer to the next than its height and `gap`. `wanted` are
 * centres in the order of drawing; they move as little as the order allows.
 */
export function spread(wanted, heights, gap, top, bottom) {
  const order = wanted.map((_, index) => index).sort((one, other) => wanted[one] - wanted[other]);
  const placed = [...wanted];
  let floor = top;
  for (const index of order) {
    placed[index] = Math.max(placed[index], floor + heights[index] / 2);
    floor = placed[index] + heights[index] / 2 + gap;
  }
  // What was pushed beyond the bottom comes back, and pushes the ones above it up. Where there is
  // not enough room for all of them, they go on below the bottom.
  const needed = heights.reduce((sum, height) => sum + height, gap * (heights.length - 1));
  let ceiling = Math.max(bottom, top + needed);
  for (const index of order.reverse()) {
    placed[index] = Math.min(placed[index], ceiling - heights[index] / 2);
    ceiling = placed[index] - heights[index] / 2 - gap;
  }
  return placed;
}

/** Evenly spaced places on one side of a box, in the order of `number` ends. */
function portsOf(box, number) {
  const margin = Math.min(24, box.height / 4);
  const room = box.height - 2 * margin;
  return Array.from({ length: number }, (_, index) =>
    number === 1 ? box.y + box.height / 2 : box.y + margin + (room * index) / (number - 1),
  );
}

function curve(x1, y1, x2, y2) {
  const reach = (x2 - x1) / 2;
  const place = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  const controls = `${place(x1 + reach, y1)} ${place(x2 - reach, y2)}`;
  return `M${place(x1, y1)}C${controls} ${place(x2, y2)}`;
}

/**
 * The places of all links.
 *
 * `boxes`: by cluster {x, y, width, height, side: "left" | "right"};
 * `links`: [{key, source, target}]; `label` and `size`: {width, height} of a label and of the map.
 * Returns by key {x, y, path, arrow}: the label's centre, the line, and the arrow at its end. Each
 * line goes through its label, so that no label is in doubt about its line.
 */
export function placeLinks(boxes, links, label, size) {
  const known = links.filter((link) => boxes.has(link.source) && boxes.has(link.target));
  const middleOf = (name) => boxes.get(name).y + boxes.get(name).height / 2;
  const wanted = known.map((link) => (middleOf(link.source) + middleOf(link.target)) / 2);
  const centres = spread(
    wanted,
    known.map(() => label.height),
    LABEL_GAP,
    4,
    size.height - 4,
  );
  const x = middleX(boxes, size);
  const ports = assignPorts(boxes, known, centres);
  const places = new Map();
  known.forEach((link, index) => {
    const y = centres[index];
    const [start, end] = [
      { x: innerEdge(boxes.get(link.source)), y: ports.get(`${index} source`) },
      { x: innerEdge(boxes.get(link.target)), y: ports.get(`${index} target`) },
    ];
    // The arrow comes in from the side of the label on which the box lies.
    const near = (box) => x + ((box.side === "left" ? -1 : 1) * label.width) / 2;
    const enter = near(boxes.get(link.source));
    const leave = near(boxes.get(link.target));
    const path = curve(start.x, start.y, enter, y) + curve(leave, y, end.x, end.y);
    places.set(link.key, { x, y, path, arrow: arrowAt(end, boxes.get(link.target).side) });
  });
  return places;
}

/** The `points` of an arrow that touches a box on this side of the map. */
function arrowAt({ x, y }, side) {
  const back = side === "left" ? x + 11 : x - 11;
  const corners = [
    [x, y],
    [back, y - 6],
    [back, y + 6],
  ];
  return corners.map((corner) => corner.map((value) => value.toFixed(1)).join(",")).join(" ");
}

function innerEdge(box) {
  return box.side === "left" ? box.x + box.width : box.x;
}

function middleX(boxes, size) {
  const all = [...boxes.values()];
  const left = Math.max(
    ...all.filter((box) => box.side === "left").map((box) => box.x + box.width),
    0,
  );
  const right = Math.min(
    ...all.filter((box) => box.side === "right").map((box) => box.x),
    size.width,
  );
  return (left + right) / 2;
}

/** A place on its box for each end of each link. They have the labels' order: no lines cross. */
function assignPorts(boxes, links, centres) {
  const ports = new Map();
  for (const [name, box] of boxes) {
    const ends = links
      .flatMap((link, index) => [
        ...(link.source === name ? [{ key: `${index} source`, y: centres[index] }] : []),
        ...(link.target === name ? [{ key: `${index} target`, y: centres[index] }] : []),
      ])
      .sort((one, other) => one.y - other.y);
    portsOf(box, ends.length).forEach((y, index) => ports.set(ends[index].key, y));
  }
  return ports;
}

/** The width of a link's line: 1.5 when idle, up to 8 when its capacity is in use. */
export function lineWidth(link) {
  if (!(link.capacity_bps > 0)) return link.rate_bps > 0 ? 3 : 1.5;
  return 1.5 + 6.5 * shareInUse(link);
}

/** The share of a link's capacity that is in use; 0 where the capacity is not known. */
export function shareInUse(link) {
  return link.capacity_bps > 0 ? Math.min(1, link.rate_bps / link.capacity_bps) : 0;
}

/** The cell that a key leads to, in a grid of `columns`; null where the key moves nothing. */
export function moveInGrid(index, number, columns, key) {
  const moves = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
  if (key === "Home") return 0;
  if (key === "End") return number - 1;
  if (!(key in moves)) return null;
  const next = index + moves[key];
  return next >= 0 && next < number ? next : index;
}
