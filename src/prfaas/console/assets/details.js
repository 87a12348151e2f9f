// The panel beside the map: details of the selected node, link or request.
//
// The numbers of a node or a link are written again with each scene; the panel's elements are made
// once for each selection.

import { html, replaceChildren, setAttribute, setText } from "prfaas/dom";
import { linkBody, nodeBody, requestBody } from "prfaas/details-body";

const BODIES = { node: nodeBody, link: linkBody, request: requestBody };

export class Details {
  /**
   * `store`: the scene and the selection. `page`: what the panel needs of its page,
   * {formatTime, loadRequest(id): Promise<{request, explanation, failures}>}, and in a replay
   * {cursor(): at_s, zone}.
   */
  constructor(store, page) {
    this.store = store;
    this.page = page;
    this.selection = null;
    this.body = null;
    this.origin = null; // the element to which the focus returns
    this.title = html("h2", { tabindex: "-1" });
    this.content = html("div", { class: "details-content" });
    const close = html(
      "button",
      {
        type: "button",
        class: "close",
        "aria-label": "Close the details",
        on: { click: () => this.close() },
      },
      "✕",
    );
    this.element = html(
      "aside",
      { id: "details", hidden: true, "aria-label": "Details" },
      html("div", { class: "section-head" }, this.title, close),
      this.content,
    );
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.selection !== null) this.close();
    });
  }

  close() {
    const origin = this.origin;
    this.store.select(null);
    if (origin?.isConnected) origin.focus();
  }

  draw() {
    const { selection } = this.store;
    if (selection !== this.selection) this.open(selection);
    if (this.body === null) return;
    setText(this.title, this.body.title());
    this.body.draw();
  }

  open(selection) {
    this.selection = selection;
    setAttribute(this.element, "hidden", selection === null);
    setAttribute(this.element, "data-about", selection?.about);
    this.body =
      selection === null ? null : BODIES[selection.about](selection.id, this.store, this.page);
    replaceChildren(this.content, this.body?.element);
    if (selection === null) return;
    // Not the panel itself, where a request of a node leads to the request.
    const active = document.activeElement;
    if (!this.element.contains(active)) this.origin = active;
    setText(this.title, this.body.title());
    this.element.scrollTop = 0;
    // A screen reader goes on in the panel. The page must not jump there for the others.
    this.title.focus({ preventScroll: true });
  }
}
