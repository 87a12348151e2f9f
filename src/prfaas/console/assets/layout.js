// The frame of every page: header, theme, status line, main.

import { html, setAttribute, setText } from "prfaas/dom";

const THEME = "prfaas-theme";

/** Storage may be forbidden, as for some pages that are opened from disk. */
function storedTheme() {
  try {
    return localStorage.getItem(THEME);
  } catch {
    return null;
  }
}

function storeTheme(theme) {
  try {
    localStorage.setItem(THEME, theme);
  } catch {
    // The choice then lasts as long as the page.
  }
}

function themeButton() {
  const root = document.documentElement;
  const preferred = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const button = html("button", { id: "theme", type: "button" });
  const apply = (theme) => {
    root.dataset.theme = theme;
    setText(button, theme === "dark" ? "Light" : "Dark");
    setAttribute(
      button,
      "aria-label",
      `Change to the ${theme === "dark" ? "light" : "dark"} theme`,
    );
  };
  apply(storedTheme() ?? preferred);
  button.addEventListener("click", () => {
    const next = root.dataset.theme === "dark" ? "light" : "dark";
    storeTheme(next);
    apply(next);
  });
  return button;
}

export class Layout {
  /** `left` and `right`: the sections of the two columns; `top` spans both. */
  constructor({ title, top = [], left, right }) {
    this.subtitle = html("p", { class: "subtitle" });
    this.connection = html("p", { class: "connection", hidden: true });
    this.actions = html("div", { class: "actions" }, themeButton());
    this.status = html("p", { id: "status", role: "status", "aria-live": "polite" });
    this.main = html(
      "main",
      { id: "main", tabindex: "-1" },
      html("div", { class: "top" }, top),
      html("div", { class: "left" }, left),
      html("div", { class: "right" }, right),
    );
    this.left = this.main.children[1];
    const skip = html("a", { class: "skip", href: "#main" }, "Skip to the content");
    document.body.append(
      skip,
      html("header", {}, html("h1", {}, title), this.subtitle, this.connection, this.actions),
      this.main,
      html("footer", {}, this.status),
    );
  }

  describe(subtitle) {
    setText(this.subtitle, subtitle);
  }

  /** Says sentences in the status line, which a screen reader speaks. */
  say(sentences) {
    if (sentences.length > 0) setText(this.status, sentences.join(" "));
  }

  /** After a redraw: which moment the page shows. */
  mark(at_s) {
    setAttribute(this.main, "data-drawn-at", at_s);
  }
}
