// The map: clusters as boxes with their nodes, and the links between them.
//
// Boxes and buttons are HTML, so that they wrap, take focus and are read aloud; the lines between
// them are one SVG below. The layout is measured only when it can have changed: when the map's
// size, a box or the list of links changes, not with each scene.

import { html, oncePerFrame, setAttribute, setText, setVariable } from "prfaas/dom";
import * as format from "prfaas/format";
import * as geometry from "prfaas/geometry";
import { LinkLayer } from "prfaas/map-links";
import { NodeGrid } from "prfaas/map-nodes";

export class SceneMap {
  /** `onSelect({about, id})`: a node or a link was activated. */
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.boxes = new Map(); // by cluster: {element, grid, side, ...}
    this.links = new LinkLayer(onSelect);
    this.left = html("div", { class: "map-column map-left" });
    this.right = html("div", { class: "map-column map-right" });
    this.canvas = html(
      "div",
      { class: "map-canvas" },
      this.links.lines,
      this.left,
      this.links.labels,
      this.right,
    );
    const title = html("h2", { id: "map-title" }, "Clusters and links");
    this.element = html(
      "section",
      { class: "map", "aria-labelledby": "map-title" },
      html("div", { class: "section-head" }, title, legend()),
      this.canvas,
    );
    // In a frame of its own: placing the labels may change the size of the map, which an observer
    // must not do while it reports.
    this.observer = new ResizeObserver(oncePerFrame(() => this.placeLinks()));
    this.observer.observe(this.canvas);
  }

  /** `isMarked(about, id)`: whether to show a node or link as selected. */
  draw(scene, isMarked) {
    const columns = geometry.columnsOf([...scene.clusters.values()]);
    this.drawColumn(this.left, "left", columns.left, scene, isMarked);
    this.drawColumn(this.right, "right", columns.right, scene, isMarked);
    this.dropBoxes(scene);
    const nodes = [...scene.clusters.values()].flatMap((cluster) => [...cluster.nodes.values()]);
    setAttribute(
      this.element,
      "data-memory",
      nodes.some((node) => node.capacity_bytes > 0),
    );
    setAttribute(this.canvas, "data-alone", columns.left.length === 0);
    if (this.links.draw(scene.links, isMarked)) this.placeLinks();
  }

  drawColumn(column, side, clusters, scene, isMarked) {
    let place = column.firstElementChild;
    for (const cluster of clusters) {
      const box = this.boxes.get(cluster.name) ?? this.createBox(cluster);
      box.side = side;
      if (box.element === place) place = place.nextElementSibling;
      else column.insertBefore(box.element, place);
      this.drawBox(box, cluster, scene, isMarked);
    }
  }

  createBox(cluster) {
    const box = {
      name: html("h3", {}),
      kind: html("span", { class: "box-kind" }),
      facts: html("p", { class: "box-facts" }),
      plan: html("p", { class: "box-plan" }),
      grid: new NodeGrid(cluster.name, this.onSelect),
    };
    box.element = html(
      "div",
      { class: "box", "data-cluster-box": cluster.name },
      html("div", { class: "box-head" }, box.name, box.kind),
      box.facts,
      box.grid.element,
      box.plan,
    );
    this.boxes.set(cluster.name, box);
    this.observer.observe(box.element);
    return box;
  }

  drawBox(box, cluster, scene, isMarked) {
    const nodes = [...cluster.nodes.values()];
    setText(box.name, cluster.name);
    setText(box.kind, cluster.kind === "pd" ? "PD cluster" : "PrfaaS cluster");
    setAttribute(box.element, "data-drained", cluster.drained);
    setText(box.facts, boxFacts(nodes, cluster));
    setText(box.plan, homeWords(scene.homes.get(cluster.name), scene.policy));
    box.grid.draw(nodes, isMarked);
  }

  dropBoxes(scene) {
    for (const [name, box] of this.boxes) {
      if (scene.clusters.has(name)) continue;
      this.observer.unobserve(box.element);
      box.element.remove();
      this.boxes.delete(name);
    }
  }

  placeLinks() {
    // The map must be high enough for the labels before it is measured.
    setVariable(this.canvas, "--labels-height", `${Math.ceil(this.links.neededHeight)}px`);
    const frame = this.canvas.getBoundingClientRect();
    const boxes = new Map();
    for (const [name, { element, side }] of this.boxes) {
      const { left, top, width, height } = element.getBoundingClientRect();
      boxes.set(name, { x: left - frame.left, y: top - frame.top, width, height, side });
    }
    this.links.place(boxes, { width: frame.width, height: frame.height });
  }
}

function boxFacts(nodes, cluster) {
  const lost = nodes.filter((node) => node.status === "lost").length;
  const having = (role) =>
    nodes.filter((node) => node.role === role && node.status !== "lost").length;
  const parts = [format.plural(nodes.length, "node")];
  if (having("prefill") > 0) parts.push(`${having("prefill")} prefill`);
  if (having("decode") > 0) parts.push(`${having("decode")} decode`);
  if (lost > 0) parts.push(`${lost} lost`);
  if (cluster.drained) parts.push("drained");
  return parts.join(" · ");
}

/** What the plan of a PD cluster says about its requests. */
function homeWords(home, policy) {
  if (home === undefined) return "";
  const waits =
    home.waiting > 0 ? ` · ${format.plural(home.waiting, "request waits", "requests wait")}` : "";
  if (home.service === "unserved") return `not served${waits}`;
  if (!home.has_plan) return `no plan yet${waits}`;
  const threshold = home.threshold_tokens || home.planned_threshold_tokens;
  const from = `from ${format.tokens(threshold)} uncached`;
  // Policy `adaptive` compares costs; the threshold of the plan is one part of them.
  const said = policy === "adaptive" ? `plan: offload ${from}` : `offloads ${from}`;
  return `${said}${waits}`;
}

function legend() {
  const entry = (kind, text, letter = "") =>
    html(
      "li",
      { class: `entry-${kind}` },
      html("span", { class: `key key-${kind}`, "aria-hidden": "true" }, letter),
      text,
    );
  return html(
    "ul",
    { class: "map-legend", "aria-label": "Legend" },
    entry("prefill", "prefill", "P"),
    entry("decode", "decode", "D"),
    entry("drains", "drains"),
    entry("idle", "not in use"),
    entry("lost", "lost", "×"),
    entry("load", "load"),
    entry("memory", "KV memory"),
  );
}
