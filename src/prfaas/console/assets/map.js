// The map: clusters as boxes with their nodes as buttons, links as lines with a label button.
//
// Boxes and buttons are HTML, so that they wrap, take focus and are read aloud; the lines between
// them are one SVG below. The layout is measured only when it can have changed: when the map's
// size, a box or the list of links changes, not with each scene.

import { html, KeyedList, oncePerFrame, setAttribute, setAttributes, setText, setVariable, svg } from "prfaas/dom";
import * as format from "prfaas/format";
import * as geometry from "prfaas/geometry";
import * as words from "prfaas/words";

const LETTERS = { prefill: "P", decode: "D" };

export class SceneMap {
  /** `onSelect({about, id})`: a node or a link was activated. */
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.boxes = new Map(); // by cluster: {element, list, ...}
    this.signature = "";
    this.lines = svg("svg", { class: "map-lines", "aria-hidden": "true" });
    this.left = html("div", { class: "map-column map-left" });
    this.right = html("div", { class: "map-column map-right" });
    this.labels = html("ul", { class: "map-labels", "aria-label": "Links" });
    this.canvas = html("div", { class: "map-canvas" }, this.lines, this.left, this.labels, this.right);
    this.element = html(
      "section",
      { class: "map", "aria-labelledby": "map-title" },
      html("div", { class: "section-head" }, html("h2", { id: "map-title" }, "Clusters and links"), legend()),
      this.canvas,
    );
    this.linkLabels = new KeyedList(
      this.labels,
      (link) => this.createLabel(link),
      (item, link) => this.drawLabel(item, link),
    );
    this.linkLines = new KeyedList(
      this.lines,
      () => svg("g", {}, svg("path", { class: "link-bed" }), svg("path", { class: "link-flow" }), svg("circle", { r: 4 })),
      (group, link) => this.drawLine(group, link),
    );
    // In a frame of its own: placing the labels may change the size of the map, which an observer
    // must not do while it reports.
    this.observer = new ResizeObserver(oncePerFrame(() => this.placeLinks()));
    this.observer.observe(this.canvas);
  }

  /** `isMarked(about, id)`: whether to show a node or link as selected. */
  draw(scene, isMarked) {
    this.scene = scene;
    this.isMarked = isMarked;
    const columns = geometry.columnsOf([...scene.clusters.values()]);
    this.drawColumn(this.left, "left", columns.left);
    this.drawColumn(this.right, "right", columns.right);
    this.dropBoxes(scene);
    setAttribute(this.canvas, "data-alone", columns.left.length === 0);
    const links = [...scene.links].map(([key, link]) => ({ key, ...link }));
    setAttribute(this.labels, "data-dense", links.length > 6);
    this.linkLabels.draw(links, (link) => link.key);
    this.linkLines.draw(links, (link) => link.key);
    const signature = links.map((link) => link.key).join("\n");
    if (signature !== this.signature) {
      this.signature = signature;
      this.placeLinks();
    }
  }

  drawColumn(column, side, clusters) {
    let place = column.firstElementChild;
    for (const cluster of clusters) {
      const box = this.boxes.get(cluster.name) ?? this.createBox(cluster);
      box.side = side;
      if (box.element === place) place = place.nextElementSibling;
      else column.insertBefore(box.element, place);
      this.drawBox(box, cluster);
    }
  }

  dropBoxes(scene) {
    for (const [name, box] of this.boxes) {
      if (scene.clusters.has(name)) continue;
      this.observer.unobserve(box.element);
      box.element.remove();
      this.boxes.delete(name);
    }
  }

  createBox(cluster) {
    const box = {
      name: html("h3", {}),
      facts: html("p", { class: "box-facts" }),
      plan: html("p", { class: "box-plan" }),
      grid: html("div", { class: "nodes", role: "group" }),
    };
    box.element = html(
      "div",
      { class: "box", "data-cluster-box": cluster.name },
      html("div", { class: "box-head" }, box.name, html("span", { class: "box-kind" }, cluster.kind === "pd" ? "PD cluster" : "PrfaaS cluster")),
      box.facts,
      box.grid,
      box.plan,
    );
    box.nodes = new KeyedList(
      box.grid,
      ({ node }) => this.createNode(node, cluster.name),
      (button, item) => this.drawNode(button, item, cluster.name),
    );
    box.grid.addEventListener("keydown", (event) => moveFocus(event, box.grid));
    // Tab enters a grid at the node that had the focus last.
    box.grid.addEventListener("focusin", (event) => setTabStop(box.grid, event.target));
    this.boxes.set(cluster.name, box);
    this.observer.observe(box.element);
    return box;
  }

  drawBox(box, cluster) {
    const nodes = [...cluster.nodes.values()];
    setText(box.name, cluster.name);
    setAttribute(box.element, "data-drained", cluster.drained);
    setAttribute(box.element, "data-kind", cluster.kind);
    setAttribute(box.grid, "data-cells", geometry.cellSize(nodes.length));
    setAttribute(box.grid, "aria-label", `Nodes of ${cluster.name}; arrow keys move between them`);
    setText(box.facts, boxFacts(nodes, cluster));
    setText(box.plan, homeWords(this.scene.homes.get(cluster.name)));
    this.drawNodes(box, nodes);
    if (box.grid.querySelector('[tabindex="0"]') === null && box.grid.firstElementChild !== null) {
      setTabStop(box.grid, box.grid.firstElementChild);
    }
  }

  drawNodes(box, nodes) {
    const isLarge = geometry.cellSize(nodes.length) === "large";
    const names = nodes.map((node) => node.name);
    const shown = isLarge ? names : words.shortNames(names);
    const items = nodes.map((node, index) => ({ node, name: shown[index] }));
    box.nodes.draw(items, (item) => item.node.id);
  }

  createNode(node, cluster) {
    return html(
      "button",
      {
        type: "button",
        class: "node",
        tabindex: "-1",
        "data-node": node.id,
        "data-cluster": cluster,
        on: { click: () => this.onSelect({ about: "node", id: node.id }) },
      },
      html("span", { class: "node-role", "aria-hidden": "true" }),
      html("span", { class: "node-name" }),
      html("span", { class: "node-load" }),
      html("span", { class: "meter meter-load" }),
      html("span", { class: "meter meter-memory" }),
    );
  }

  drawNode(button, { node, name: shownName }, cluster) {
    // `applyDelta` shares what has not changed, and most nodes have not.
    const marked = this.isMarked("node", node.id);
    if (button.drawn === node && button.marked === marked && button.shownName === shownName) return;
    button.drawn = node;
    button.shownName = shownName;
    button.marked = marked;
    const [role, name, load] = button.children;
    setAttributes(button, {
      "data-name": node.name,
      "data-status": node.status,
      "data-role": node.role ?? "",
      "data-becomes": node.becomes,
      "data-memory": node.capacity_bytes > 0,
      "aria-pressed": String(marked),
      "aria-label": words.nodeDescription(node, cluster),
      title: words.nodeDescription(node, cluster),
    });
    setText(role, node.status === "lost" ? "×" : LETTERS[node.role] ?? "·");
    setText(name, shownName);
    setText(load, node.status === "in use" ? words.nodeLoad(node) : node.becomes ? `drains → ${node.becomes}` : node.status);
    setVariable(button, "--load", geometry.loadOf(node).toFixed(3));
    const capacity = node.capacity_bytes || 1;
    setVariable(button, "--memory", Math.min(1, node.used_bytes / capacity).toFixed(3));
    setVariable(button, "--evictable", Math.min(1, (node.used_bytes + node.evictable_bytes) / capacity).toFixed(3));
  }

  createLabel(link) {
    const button = html(
      "button",
      {
        type: "button",
        class: "link-label",
        "data-link": link.key,
        on: { click: () => this.onSelect({ about: "link", id: link.key }) },
      },
      html("span", { class: "link-name" }),
      html("span", { class: "link-verdict" }),
      html("span", { class: "link-rate" }),
      html("span", { class: "meter meter-link" }),
      html("span", { class: "link-queue" }),
    );
    return html("li", {}, button);
  }

  drawLabel(item, link) {
    const button = item.firstElementChild;
    const [name, verdict, rate, , queue] = button.children;
    setAttributes(button, {
      "data-verdict": link.verdict,
      "aria-pressed": String(this.isMarked("link", link.key)),
      "aria-label": words.linkDescription(link),
      title: words.linkDescription(link),
    });
    setText(name, format.linkLabel(link));
    setText(verdict, link.verdict);
    setText(rate, format.rateOf(link.rate_bps, link.capacity_bps));
    setText(queue, queueWords(link));
    setVariable(button, "--share", link.capacity_bps > 0 ? Math.min(1, link.rate_bps / link.capacity_bps).toFixed(3) : "0");
  }

  drawLine(group, link) {
    setAttributes(group, {
      class: "link",
      "data-verdict": link.verdict,
      "data-flows": link.rate_bps > 0 && link.verdict !== "cut",
      "data-marked": this.isMarked("link", link.key),
    });
    setAttribute(group.children[1], "stroke-width", geometry.lineWidth(link).toFixed(1));
  }

  placeLinks() {
    if (this.scene === undefined) return;
    const frame = this.canvas.getBoundingClientRect();
    const boxes = new Map();
    for (const [name, box] of this.boxes) {
      const found = box.element.getBoundingClientRect();
      boxes.set(name, {
        x: found.left - frame.left,
        y: found.top - frame.top,
        width: found.width,
        height: found.height,
        side: box.side,
      });
    }
    const first = this.labels.querySelector("button")?.getBoundingClientRect();
    const label = { width: first?.width ?? 0, height: first?.height ?? 0 };
    setVariable(this.canvas, "--labels-height", `${this.scene.links.size * (label.height + 8)}px`);
    const links = [...this.scene.links].map(([key, { source, target }]) => ({ key, source, target }));
    const size = { width: frame.width, height: this.canvas.clientHeight };
    const places = geometry.placeLinks(boxes, links, label, size);
    setAttributes(this.lines, { width: size.width, height: size.height });
    for (const [key, place] of places) {
      const item = this.linkLabels.elements.get(key);
      const group = this.linkLines.elements.get(key);
      setVariable(item, "--x", `${place.x.toFixed(1)}px`);
      setVariable(item, "--y", `${place.y.toFixed(1)}px`);
      setAttribute(group.children[0], "d", place.path);
      setAttribute(group.children[1], "d", place.path);
      setAttributes(group.children[2], { cx: place.end.x.toFixed(1), cy: place.end.y.toFixed(1) });
    }
  }
}

function boxFacts(nodes, cluster) {
  const having = (role) => nodes.filter((node) => node.role === role && node.status !== "lost").length;
  const parts = [format.plural(nodes.length, "node")];
  if (having("prefill") > 0) parts.push(`${having("prefill")} prefill`);
  if (having("decode") > 0) parts.push(`${having("decode")} decode`);
  const lost = nodes.filter((node) => node.status === "lost").length;
  if (lost > 0) parts.push(`${lost} lost`);
  if (cluster.drained) parts.push("drained");
  return parts.join(" · ");
}

function homeWords(home) {
  if (home === undefined) return "";
  const waits = home.waiting > 0 ? ` · ${format.plural(home.waiting, "request waits", "requests wait")}` : "";
  if (!home.has_plan) return `no plan yet${waits}`;
  const threshold = home.threshold_tokens || home.planned_threshold_tokens;
  return `offloads from ${format.tokens(threshold)} uncached${waits}`;
}

function queueWords(link) {
  if (link.planned) return "planned";
  const parts = [];
  if (link.backlog_bytes > 0) parts.push(`${format.bytes(link.backlog_bytes)} queued, ${format.duration(link.waited_s)}`);
  else parts.push("no queue");
  if (link.lost_segments > 0) parts.push(`${format.short(link.lost_segments)} resent`);
  return parts.join(" · ");
}

function legend() {
  const entry = (kind, text) => html("li", {}, html("span", { class: `key key-${kind}`, "aria-hidden": "true" }), text);
  return html(
    "ul",
    { class: "map-legend", "aria-label": "Legend" },
    entry("prefill", "prefill"),
    entry("decode", "decode"),
    entry("drains", "drains"),
    entry("idle", "not in use"),
    entry("lost", "lost"),
    entry("load", "load"),
    entry("memory", "KV memory"),
  );
}

function setTabStop(grid, button) {
  for (const other of grid.querySelectorAll('[tabindex="0"]')) other.setAttribute("tabindex", "-1");
  button.setAttribute("tabindex", "0");
}

function moveFocus(event, grid) {
  const buttons = [...grid.children];
  const columns = getComputedStyle(grid).gridTemplateColumns.split(" ").length;
  const next = geometry.moveInGrid(buttons.indexOf(event.target), buttons.length, columns, event.key);
  if (next === null) return;
  event.preventDefault();
  buttons[next].focus();
}
