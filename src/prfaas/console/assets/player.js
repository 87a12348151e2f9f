// The player of a replay: play and pause, a slider over the run, the speed, the choice of the run.

import { html, setAttribute, setAttributes, setText } from "prfaas/dom";
import * as format from "prfaas/format";

const LENGTHS_S = [20, 60, 180]; // how long it takes to play the whole run

export class Player {
  /** `onMove(at_s)`: show this time. `onRun(index)`: show another run. */
  constructor({ runs, onMove, onRun }) {
    this.onMove = onMove;
    this.span = [0, 0];
    this.at = 0;
    this.isPlaying = false;
    this.button = html(
      "button",
      {
        id: "play",
        type: "button",
        class: "primary",
        "aria-pressed": "false",
        on: { click: () => this.toggle() },
      },
      "Play",
    );
    this.slider = html("input", {
      id: "scrub",
      type: "range",
      step: "any",
      "aria-label": "Time in the run",
      on: { input: () => this.drag() },
    });
    this.clock = html("output", { for: "scrub" });
    this.length = html(
      "select",
      { id: "speed" },
      LENGTHS_S.map((seconds) =>
        html(
          "option",
          { value: seconds, selected: seconds === 60 },
          `the whole run in ${format.duration(seconds)}`,
        ),
      ),
    );
    this.runs = html(
      "select",
      { id: "run", on: { change: () => onRun(this.runs.selectedIndex) } },
      runs.map((name, index) => html("option", { value: index }, name)),
    );
    this.element = html(
      "section",
      { class: "player", "aria-label": "Replay" },
      html("label", { for: "run" }, "run ", this.runs),
      this.button,
      this.slider,
      this.clock,
      html("label", { for: "speed", class: "visually-hidden" }, "Speed"),
      this.length,
    );
  }

  setSpan([from, to]) {
    this.span = [from, to];
    setAttributes(this.slider, { min: from, max: to });
  }

  /** Moves to a time, within the run. */
  seek(at_s) {
    this.at = Math.min(this.span[1], Math.max(this.span[0], at_s));
    this.slider.value = this.at;
    const text = `${format.runTime(this.at)} of ${format.runTime(this.span[1])}`;
    setText(this.clock, text);
    setAttribute(this.slider, "aria-valuetext", text);
    this.onMove(this.at);
  }

  drag() {
    this.pause();
    this.seek(Number(this.slider.value));
  }

  toggle() {
    if (this.isPlaying) {
      this.pause();
      return;
    }
    if (this.at >= this.span[1]) this.seek(this.span[0]);
    this.isPlaying = true;
    this.drawButton();
    this.last = null;
    requestAnimationFrame((now) => this.step(now));
  }

  pause() {
    this.isPlaying = false;
    this.drawButton();
  }

  drawButton() {
    setText(this.button, this.isPlaying ? "Pause" : "Play");
    setAttribute(this.button, "aria-pressed", String(this.isPlaying));
  }

  step(now) {
    if (!this.isPlaying) return;
    const passed = this.last === null ? 0 : (now - this.last) / 1000;
    this.last = now;
    this.seek(this.at + (passed * (this.span[1] - this.span[0])) / Number(this.length.value));
    if (this.at >= this.span[1]) this.pause();
    else requestAnimationFrame((next) => this.step(next));
  }
}
