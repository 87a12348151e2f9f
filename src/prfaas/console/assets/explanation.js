// Why a request went where it went: the choice, and the alternatives with their predicted times.
// The data are those of `/prfaas/v1/explain`.

import { drawSplitBar, Facts, splitBar, sumOfParts } from "prfaas/bars";
import { html } from "prfaas/dom";
import * as format from "prfaas/format";

const MOST_SHOWN = 16;

/** One sentence about the choice. */
export function choiceInWords(chosen) {
  if (chosen.wait) {
    const where = chosen.for ? ` for a node of ${chosen.for}` : "";
    return `The request waits${where}: ${chosen.reason}.`;
  }
  if (chosen.alone || chosen.prefill === chosen.decode) {
    return `Node ${chosen.decode} of ${chosen.decode_cluster} prefills and decodes it.`;
  }
  const away = chosen.offloaded ? ", another cluster," : "";
  const prefill = `Node ${chosen.prefill} of ${chosen.cluster}${away} prefills it`;
  return `${prefill}; node ${chosen.decode} of ${chosen.decode_cluster} decodes it.`;
}

/**
 * What spoke for the choice, in sentences: the predictions side by side, the costs that policy
 * `adaptive` compares, and the threshold.
 */
export function comparisonInWords({ chosen, threshold_tokens, alternatives }, promptTokens) {
  if (chosen.wait) return [];
  const said = [];
  // The alternatives are ordered by their prediction.
  const taken = alternatives.find((one) => one.node === chosen.prefill);
  const other = alternatives.find((one) => one.cluster !== chosen.cluster);
  if (taken !== undefined && other !== undefined) {
    const compare = ([own, others], word = "") =>
      `${word}${own} this way, ${word}${others} by way of ${other.cluster}.`;
    const firsts = [taken, other].map((one) => format.duration(sumOfParts(one)));
    said.push(`Predicted first token: ${compare(firsts, "after ")}`);
    if (hasCost(taken) && hasCost(other)) {
      const costs = [taken, other].map((one) => format.duration(one.cost_s));
      said.push(`With the delay that it causes to later requests: ${compare(costs)}`);
    }
  }
  if (promptTokens !== null && Number.isFinite(threshold_tokens)) {
    const uncached = promptTokens - chosen.cached_tokens;
    const side = uncached > threshold_tokens ? "more than" : "at most";
    const whose = alternatives.some(hasCost) ? "the plan's threshold" : "the threshold";
    said.push(
      `${format.count(uncached)} of its ${format.count(promptTokens)} tokens are uncached there, ` +
        `${side} ${whose} of ${format.count(Math.round(threshold_tokens))}.`,
    );
  }
  return said;
}

/** Only policy `adaptive` compares costs. */
function hasCost(alternative) {
  return typeof alternative.cost_s === "number";
}

/**
 * `explanation` as the gateway returns it; `promptTokens` where known. `withChoice`: begin with the
 * sentence about the choice, which a panel about a finished request has already.
 */
export function explanationView(explanation, promptTokens = null, withChoice = true) {
  if (explanation === null || explanation === undefined) {
    return html(
      "p",
      { class: "hint", "data-part": "explanation" },
      "No explanation was kept for this request.",
    );
  }
  const { chosen } = explanation;
  const alternatives = explanation.alternatives ?? [];
  return html(
    "div",
    { "data-part": "explanation", class: "explanation" },
    withChoice ? html("p", { class: "choice" }, choiceInWords(chosen)) : null,
    chosen.wait
      ? null
      : html("p", { class: "reason" }, html("b", {}, "Why: "), `${chosen.reason}.`),
    comparisonInWords({ ...explanation, alternatives }, promptTokens).map((text) =>
      html("p", {}, text),
    ),
    alternativesView(alternatives, chosen.prefill ?? null),
    new Facts().draw(choiceFacts(chosen)),
  );
}

function choiceFacts(chosen) {
  if (chosen.wait) return [];
  return [
    ["cached there", `${format.count(chosen.cached_tokens)} tokens`],
    [
      "handed over",
      chosen.nbytes > 0
        ? `${format.bytes(chosen.nbytes)}${chosen.form ? `, ${chosen.form} form` : ""}`
        : null,
    ],
    [
      "copies first",
      chosen.copies?.length > 0
        ? format.plural(chosen.copies.length, "cached prefix", "cached prefixes")
        : null,
    ],
  ];
}

/** Alternatives: {cluster, node, cached_tokens, wait_s, prefill_s, transfer_s, decode_s, ...}. */
export function alternativesView(alternatives, chosenNode) {
  if (alternatives.length === 0) return null;
  const longest = Math.max(...alternatives.map(sumOfParts));
  // Two alternatives may name one node (with and without a copied prefix): the first is the best.
  const taken = alternatives.findIndex((one) => one.node === chosenNode);
  const rows = alternatives
    .slice(0, MOST_SHOWN)
    .map((one, index) => alternativeRow(one, longest, index === taken));
  const hidden = alternatives.length - rows.length;
  return html(
    "div",
    { class: "alternatives" },
    html(
      "table",
      {},
      html("caption", {}, "Predicted time to first token of each alternative"),
      html(
        "thead",
        {},
        html(
          "tr",
          {},
          ["prefill node", "cached", "predicted"].map((name) => html("th", { scope: "col" }, name)),
        ),
      ),
      html("tbody", { "data-part": "alternatives" }, rows),
    ),
    hidden > 0
      ? html("p", { class: "hint" }, `${format.plural(hidden, "more alternative")} would be later.`)
      : null,
  );
}

function alternativeRow(one, longest, taken) {
  const bar = splitBar();
  drawSplitBar(bar, one, longest);
  const remarks = [
    one.cluster,
    one.alone ? "decodes as well" : "",
    one.copies > 0 ? "after a copy" : "",
  ];
  return html(
    "tr",
    { class: taken ? "taken" : null },
    html(
      "th",
      { scope: "row" },
      one.node,
      taken ? html("span", { class: "badge" }, "chosen") : null,
      html("small", {}, remarks.filter((text) => text).join(", ")),
    ),
    html("td", {}, format.short(one.cached_tokens)),
    html(
      "td",
      { class: "predicted" },
      html("b", {}, format.duration(sumOfParts(one))),
      hasCost(one) ? html("small", {}, ` cost ${format.duration(one.cost_s)}`) : null,
      bar,
    ),
  );
}
