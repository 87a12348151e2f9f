// The top of the page: what the system is doing in a sentence, the main figures, and the problems.

import { html, KeyedList, setAttribute, setAttributes, setText } from "prfaas/dom";
import * as format from "prfaas/format";
import { figuresAt, WINDOW_S } from "prfaas/history";
import * as words from "prfaas/words";

const MOST_PROBLEMS = 6;

export class Overview {
  /** `windowSeconds`: the figures are those of so many seconds. */
  constructor(onSelect, windowSeconds = WINDOW_S) {
    this.windowSeconds = windowSeconds;
    this.silence = ""; // why the scene is not that of now
    this.sentence = html("p", { class: "statement" });
    this.list = html("ul", { class: "problems", "aria-label": "Problems" });
    this.tilesList = html("dl", { class: "tiles" });
    this.problems = new KeyedList(
      this.list,
      (problem) =>
        html(
          "li",
          {},
          // A problem without something to select is plain text.
          html(problem.select === null ? "span" : "button", {
            type: problem.select === null ? null : "button",
            class: "chip",
            on: problem.select === null ? {} : { click: () => onSelect(problem.select) },
          }),
        ),
      (item, problem) => {
        setAttribute(item.firstElementChild, "data-severity", problem.severity);
        setText(item.firstElementChild, problem.text);
      },
    );
    this.tiles = new KeyedList(
      this.tilesList,
      () => html("div", { class: "tile" }, html("dt", {}), html("dd", {})),
      (tile, { name, value, note }) => {
        setText(tile.firstElementChild, name);
        setText(tile.lastElementChild, value);
        setAttributes(tile, { title: note });
      },
    );
    this.element = html(
      "section",
      { class: "overview", "aria-labelledby": "overview-title" },
      html("h2", { id: "overview-title", class: "visually-hidden" }, "Overview"),
      html("div", { class: "overview-words" }, this.sentence, this.list),
      this.tilesList,
    );
  }

  /** `index`: of the sample to show; the last one unless given. */
  draw(scene, samples, index = samples.length - 1) {
    const figures = figuresAt(samples, index, this.windowSeconds);
    const stated = words.statement(scene, figures, this.windowSeconds);
    setText(this.sentence, this.silence === "" ? stated : `As last reported: ${stated}`);
    const found = words.problems(scene);
    if (this.silence !== "") found.unshift({ severity: "bad", text: this.silence, select: null });
    const shown = found.slice(0, MOST_PROBLEMS);
    if (found.length > shown.length) {
      shown.push({
        severity: "note",
        text: `and ${found.length - shown.length} more`,
        select: null,
      });
    }
    if (found.length === 0) {
      shown.push({ severity: "good", text: allIsWell(scene), select: null });
    }
    // The same thing keeps its chip while the numbers in its text change.
    this.problems.draw(shown, (problem) =>
      problem.select === null ? problem.text : `${problem.select.about} ${problem.select.id}`,
    );
    this.tiles.draw(tilesOf(scene, figures, this.windowSeconds), (tile) => tile.name);
  }
}

function allIsWell(scene) {
  return scene.links.size > 0
    ? "All links are clear, all nodes are in use"
    : "All nodes are in use";
}

function tilesOf(scene, figures, windowSeconds) {
  const recently = `over the last ${format.duration(windowSeconds)}`;
  const known = (value, write) => (value === null ? "-" : write(value));
  const waiting = [...scene.homes.values()].reduce((sum, home) => sum + home.waiting, 0);
  return [
    {
      name: "requests",
      value: known(figures.requests, format.perSecond),
      note: `Finished per second, ${recently}`,
    },
    {
      name: "TTFT",
      value: known(figures.ttft, format.duration),
      note: `Mean time to first token, ${recently}`,
    },
    {
      name: "offloaded",
      value: known(figures.offloaded, format.percent),
      note: "Share of requests that another cluster prefilled",
    },
    {
      name: "cached",
      value: known(figures.cached, format.percent),
      note: "Share of prompt tokens that were found in a cache",
    },
    { name: "in flight", value: format.count(scene.in_flight), note: "Requests in flight" },
    { name: "waiting", value: format.count(waiting), note: "Requests that wait for a node" },
  ];
}
