// The nodes of one cluster: a grid of buttons. Tab enters the grid, arrow keys move within it.

import { html, KeyedList, setAttribute, setAttributes, setText, setVariable } from "prfaas/dom";
import * as geometry from "prfaas/geometry";
import * as words from "prfaas/words";

const LETTERS = { prefill: "P", decode: "D" };

export class NodeGrid {
  /** `onSelect({about: "node", id})`: a node was activated. */
  constructor(cluster, onSelect) {
    this.cluster = cluster;
    this.onSelect = onSelect;
    this.element = html("div", {
      class: "nodes",
      role: "group",
      "aria-label": `Nodes of ${cluster}; arrow keys move between them`,
    });
    this.buttons = new KeyedList(
      this.element,
      ({ node }) => this.createButton(node),
      (button, item) => this.drawButton(button, item),
    );
    this.element.addEventListener("keydown", (event) => this.moveFocus(event));
    // Tab enters the grid at the node that had the focus last.
    this.element.addEventListener("focusin", (event) => this.setTabStop(event.target));
  }

  draw(nodes, isMarked) {
    this.isMarked = isMarked;
    const cells = geometry.cellSize(nodes.length);
    setAttribute(this.element, "data-cells", cells);
    const names = nodes.map((node) => node.name);
    const shown = cells === "large" ? names : words.shortNames(names);
    const items = nodes.map((node, index) => ({ node, shownName: shown[index] }));
    this.buttons.draw(items, ({ node }) => node.id);
    const first = this.element.firstElementChild;
    if (first !== null && this.element.querySelector('[tabindex="0"]') === null) {
      this.setTabStop(first);
    }
  }

  createButton(node) {
    return html(
      "button",
      {
        type: "button",
        class: "node",
        tabindex: "-1",
        "data-node": node.id,
        "data-cluster": this.cluster,
        on: { click: () => this.onSelect({ about: "node", id: node.id }) },
      },
      html("span", { class: "node-role", "aria-hidden": "true" }),
      html("span", { class: "node-name" }),
      html("span", { class: "node-load" }),
      html("span", { class: "meter meter-load" }),
      html("span", { class: "meter meter-memory" }),
    );
  }

  drawButton(button, { node, shownName }) {
    const marked = this.isMarked("node", node.id);
    const drawn = button.drawn;
    if (
      drawn?.marked === marked &&
      drawn.shownName === shownName &&
      haveEqualFields(drawn.node, node)
    ) {
      return; // most nodes do not change from scene to scene
    }
    button.drawn = { node, marked, shownName };
    const [role, name, load, loadMeter, memoryMeter] = button.children;
    const description = words.nodeDescription(node, this.cluster);
    setAttributes(button, {
      "data-name": node.name,
      "data-status": node.status,
      "data-role": node.role ?? "",
      "data-memory": node.capacity_bytes > 0,
      "aria-pressed": String(marked),
      "aria-label": description,
      title: description,
    });
    setText(role, node.status === "lost" ? "×" : (LETTERS[node.role] ?? "·"));
    setText(name, shownName);
    setText(load, loadWords(node));
    // On the meters, not on the button: its other children would inherit, and be styled again.
    setVariable(loadMeter, "--load", geometry.loadOf(node).toFixed(3));
    const share = (bytes) => Math.min(1, bytes / (node.capacity_bytes || 1)).toFixed(3);
    setVariable(memoryMeter, "--memory", share(node.used_bytes));
    setVariable(memoryMeter, "--evictable", share(node.used_bytes + node.evictable_bytes));
  }

  setTabStop(button) {
    for (const other of this.element.querySelectorAll('[tabindex="0"]')) {
      setAttribute(other, "tabindex", "-1");
    }
    setAttribute(button, "tabindex", "0");
  }

  moveFocus(event) {
    const buttons = [...this.element.children];
    const columns = getComputedStyle(this.element).gridTemplateColumns.split(" ").length;
    const index = buttons.indexOf(event.target);
    const next = geometry.moveInGrid(index, buttons.length, columns, event.key);
    if (next === null) return;
    event.preventDefault();
    buttons[next].focus();
  }
}

function haveEqualFields(one, other) {
  // `applyDelta` shares the nodes that it does not change; a replay makes new ones.
  if (one === other) return true;
  for (const key in other) if (one[key] !== other[key]) return false;
  return true;
}

function loadWords(node) {
  if (node.status === "in use") return words.nodeLoad(node);
  return node.becomes === null ? node.status : `becomes ${node.becomes}`;
}
