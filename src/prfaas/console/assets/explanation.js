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
  if (chosen.remainder || chosen.prefill === chosen.decode) {
    return `Node ${chosen.decode} of ${chosen.decode_cluster} prefills and decodes it.`;
  }
  const away = chosen.offloaded ? "another cluster, " : "";
  return `Node ${chosen.prefill} of ${away}${chosen.cluster} prefills it; node ${chosen.decode} of ${chosen.decode_cluster} decodes it.`;
}

/** `explanation` as the gateway returns it; `promptTokens` where known. */
export function explanationView(explanation, promptTokens = null) {
  if (explanation === null || explanation === undefined) {
    return html("p", { class: "hint", "data-part": "explanation" }, "The gateway has kept no explanation for this request.");
  }
  const { chosen } = explanation;
  return html(
    "div",
    { "data-part": "explanation", class: "explanation" },
    html("p", { class: "choice" }, choiceInWords(chosen)),
    chosen.wait ? null : html("p", { class: "reason" }, html("b", {}, "Why: "), `${chosen.reason}.`),
    new Facts().draw(choiceFacts(explanation, promptTokens)),
    alternativesView(explanation.alternatives ?? [], chosen.prefill ?? null),
  );
}

function choiceFacts({ chosen, threshold_tokens }, promptTokens) {
  if (chosen.wait) return [];
  const uncached = promptTokens === null ? null : promptTokens - chosen.cached_tokens;
  return [
    ["uncached", uncached === null ? null : `${format.count(uncached)} of ${format.count(promptTokens)} tokens`],
    ["threshold", threshold_tokens === undefined || threshold_tokens === null ? null : format.tokens(threshold_tokens)],
    ["cached there", `${format.count(chosen.cached_tokens)} tokens`],
    ["handed over", chosen.nbytes > 0 ? `${format.bytes(chosen.nbytes)}${chosen.form ? `, ${chosen.form} form` : ""}` : null],
    ["copies first", chosen.copies?.length > 0 ? format.plural(chosen.copies.length, "cached prefix", "cached prefixes") : null],
  ];
}

/** Alternatives: {cluster, node, cached_tokens, wait_s, prefill_s, transfer_s, decode_s, ...}. */
export function alternativesView(alternatives, chosenNode) {
  if (alternatives.length === 0) return null;
  const longest = Math.max(...alternatives.map(sumOfParts));
  // Two alternatives may name one node (with and without a copied prefix): the first is the best.
  const taken = alternatives.findIndex((one) => one.node === chosenNode);
  const rows = alternatives.slice(0, MOST_SHOWN).map((one, index) => alternativeRow(one, longest, index === taken));
  const hidden = alternatives.length - rows.length;
  return html(
    "div",
    { class: "alternatives" },
    html(
      "table",
      {},
      html("caption", {}, "Predicted time to first token of each alternative"),
      html("thead", {}, html("tr", {}, ["prefill node", "cached", "predicted"].map((name) => html("th", { scope: "col" }, name)))),
      html("tbody", { "data-part": "alternatives" }, rows),
    ),
    hidden > 0 ? html("p", { class: "hint" }, `${format.plural(hidden, "more alternative")} would be later.`) : null,
  );
}

function alternativeRow(one, longest, taken) {
  const bar = splitBar();
  drawSplitBar(bar, one, longest);
  const remarks = [one.cluster, one.remainder ? "decodes as well" : "", one.copies > 0 ? "after a copy" : ""];
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
    html("td", { class: "predicted" }, html("b", {}, format.duration(sumOfParts(one))), bar),
  );
}
