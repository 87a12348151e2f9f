// The links of the map: lines in an SVG below the boxes, and for each link a button as its label.

import {
  html,
  KeyedList,
  setAttribute,
  setAttributes,
  setText,
  setVariable,
  svg,
} from "prfaas/dom";
import * as format from "prfaas/format";
import * as geometry from "prfaas/geometry";
import * as words from "prfaas/words";

const DENSE = 6; // more links than this have labels of two lines instead of three

export class LinkLayer {
  /** `onSelect({about: "link", id})`: a label was activated. */
  constructor(onSelect) {
    this.onSelect = onSelect;
    this.links = [];
    this.lines = svg("svg", { class: "map-lines", "aria-hidden": "true" });
    this.labels = html("ul", { class: "map-labels", "aria-label": "Links" });
    this.items = new KeyedList(
      this.labels,
      (link) => this.createLabel(link),
      (item, link) => this.drawLabel(item, link),
    );
    this.groups = new KeyedList(
      this.lines,
      () => createLine(),
      (group, link) => this.drawLine(group, link),
    );
  }

  /** Returns whether the list of links has changed, so that they need places. */
  draw(links, isMarked) {
    const before = this.links;
    this.isMarked = isMarked;
    this.links = [...links].map(([key, link]) => ({ key, ...link }));
    setAttribute(this.labels, "data-dense", this.links.length > DENSE);
    this.items.draw(this.links, (link) => link.key);
    this.groups.draw(this.links, (link) => link.key);
    return (
      before.length !== this.links.length ||
      before.some((link, index) => link.key !== this.links[index].key)
    );
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
      html("span", { class: "link-loss" }),
      html("span", { class: "meter meter-link" }),
      html("span", { class: "link-queue" }),
    );
    return html("li", {}, button);
  }

  drawLabel(item, link) {
    const button = item.firstElementChild;
    const [name, verdict, rate, loss, meter, queue] = button.children;
    setAttributes(button, {
      "data-verdict": link.verdict,
      "aria-pressed": String(this.isMarked("link", link.key)),
      "aria-label": words.linkDescription(link),
      title: words.linkDescription(link),
    });
    setText(name, format.linkLabel(link));
    // A plan has no verdict; its links are more or less full.
    setText(verdict, link.planned ? format.percent(geometry.shareInUse(link)) : link.verdict);
    setText(rate, format.rateOf(link.rate_bps, link.capacity_bps));
    setText(loss, link.lost_segments > 0 ? `${format.short(link.lost_segments)} resent` : "");
    setText(queue, queueWords(link));
    setVariable(meter, "--share", geometry.shareInUse(link).toFixed(3));
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

  /** The height that the labels need, one below the other. */
  get neededHeight() {
    return this.links.length * (this.labelSize().height + geometry.LABEL_GAP);
  }

  labelSize() {
    const found = this.labels.querySelector("button")?.getBoundingClientRect();
    return { width: found?.width ?? 0, height: found?.height ?? 0 };
  }

  /** `boxes` and `size` as `geometry.placeLinks` takes them. */
  place(boxes, size) {
    setAttributes(this.lines, { width: size.width, height: size.height });
    const places = geometry.placeLinks(boxes, this.links, this.labelSize(), size);
    for (const [key, { x, y, path, arrow }] of places) {
      const item = this.items.elements.get(key);
      setVariable(item, "--x", `${x.toFixed(1)}px`);
      setVariable(item, "--y", `${y.toFixed(1)}px`);
      const [bed, flow, head] = this.groups.elements.get(key).children;
      setAttribute(bed, "d", path);
      setAttribute(flow, "d", path);
      setAttribute(head, "points", arrow);
    }
  }
}

function createLine() {
  return svg(
    "g",
    {},
    svg("path", { class: "link-bed" }),
    svg("path", { class: "link-flow" }),
    svg("polygon", {}),
  );
}

function queueWords(link) {
  if (link.planned) return "planned";
  if (link.backlog_bytes === 0) return "no queue";
  const oldest = link.waited_s > 0 ? ` for ${format.duration(link.waited_s)}` : "";
  return `${format.bytes(link.backlog_bytes)} queued${oldest}`;
}
