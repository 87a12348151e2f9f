// The box in which to type a prompt: the answer streams, with its route and explanation beside it.

import { html, replaceChildren, setAttribute, setText } from "prfaas/dom";
import { explanationView } from "prfaas/explanation";
import * as format from "prfaas/format";
import { EventParser, textOf } from "prfaas/sse";
import * as words from "prfaas/words";

const MOST_OUTPUT_TOKENS = 4096;

/** Text, or a list of token ids for gateways without a tokenizer: "[1, 2, 3]". Pure. */
export function promptOf(text) {
  if (!/^\s*\[[\d\s,]+\]\s*$/.test(text)) return text;
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/** The message of a failed response: OpenAI's error object where there is one. */
async function failureOf(response) {
  if (response.status === 401)
    return new Error("The session has ended; reload the page to log in.");
  const answer = await response.json().catch(() => null);
  return new Error(
    answer?.error?.message ?? `The gateway answered with status ${response.status}.`,
  );
}

async function post(path, body, signal) {
  const response = await fetch(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  if (!response.ok) throw await failureOf(response);
  return response;
}

export class PromptBox {
  /** `loadRequest(id)`: what the gateway knows of a request, once it is routed. */
  constructor({ loadRequest, onSelect }) {
    this.loadRequest = loadRequest;
    this.onSelect = onSelect;
    this.running = null; // the AbortController of the request under way
    this.text = html("textarea", {
      id: "prompt-text",
      rows: "3",
      placeholder: "Type a prompt, or token ids: [1, 2, 3]",
      spellcheck: "false",
    });
    this.most = html("input", {
      id: "prompt-tokens",
      type: "number",
      min: "1",
      max: MOST_OUTPUT_TOKENS,
      value: "64",
    });
    this.tenant = html("select", { id: "prompt-tenant" });
    this.tenantField = html(
      "label",
      { for: "prompt-tenant", hidden: true },
      "tenant ",
      this.tenant,
    );
    this.send = html("button", { id: "prompt-send", type: "submit", class: "primary" }, "Send");
    this.explain = html(
      "button",
      {
        id: "prompt-explain",
        type: "button",
        on: { click: () => this.run(() => this.explainOnly()) },
      },
      "Explain only",
    );
    this.problem = html("p", { class: "problem", role: "alert", hidden: true });
    this.answer = html("div", {
      id: "prompt-answer",
      hidden: true,
      tabindex: "0",
      "aria-label": "Answer",
    });
    this.route = html("p", {
      id: "prompt-route",
      class: "choice",
      "aria-live": "polite",
      hidden: true,
    });
    this.explanation = html("div", { id: "prompt-explanation", hidden: true });
    const form = html(
      "form",
      {},
      html("label", { for: "prompt-text", class: "visually-hidden" }, "Prompt"),
      this.text,
      html(
        "div",
        { class: "prompt-controls" },
        html("label", { for: "prompt-tokens" }, "at most ", this.most, " tokens"),
        this.tenantField,
        this.explain,
        this.send,
      ),
    );
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run(() => this.complete());
    });
    this.element = html(
      "section",
      { class: "prompt", "aria-labelledby": "prompt-title" },
      html("h2", { id: "prompt-title" }, "Try a prompt"),
      form,
      this.problem,
      this.answer,
      this.route,
      this.explanation,
    );
  }

  drawTenants(names) {
    const known = [...this.tenant.options].map((option) => option.value);
    setAttribute(this.tenantField, "hidden", names.length === 0);
    if (known.join("\n") === names.join("\n")) return;
    replaceChildren(
      this.tenant,
      names.map((name) => html("option", { value: name }, name)),
    );
  }

  show(part, isShown) {
    setAttribute(part, "hidden", !isShown);
  }

  /** Runs one request; a second click on Send stops it. */
  async run(work) {
    if (this.running !== null) {
      this.running.abort();
      return;
    }
    if (this.text.value.trim() === "") {
      this.text.focus();
      return;
    }
    this.running = new AbortController();
    setText(this.send, "Stop");
    for (const part of [this.problem, this.answer, this.route, this.explanation])
      this.show(part, false);
    try {
      await work();
    } catch (error) {
      if (error.name !== "AbortError") {
        setText(this.problem, error.message);
        this.show(this.problem, true);
      }
    } finally {
      this.running = null;
      setText(this.send, "Send");
    }
  }

  body() {
    return { prompt: promptOf(this.text.value), tenant: this.tenant.value };
  }

  async explainOnly() {
    const response = await post("console/explain", this.body(), this.running.signal);
    this.drawExplanation(await response.json(), null);
  }

  async complete() {
    const body = { ...this.body(), max_tokens: Number(this.most.value) || 64 };
    setText(this.answer, "");
    const response = await post("console/complete", body, this.running.signal);
    this.show(this.answer, true);
    const id = response.headers.get("X-Request-Id");
    let explained = false;
    for await (const { event, data } of eventsOf(response)) {
      if (data === "[DONE]") break;
      if (event === "message") {
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message ?? "The request failed.");
        // Appended as text: what a model writes is never markup.
        this.answer.append(textOf(chunk));
        this.answer.scrollTop = this.answer.scrollHeight;
      }
      if (!explained && id !== null) {
        explained = true;
        this.loadRoute(id);
      }
    }
    if (id !== null) await this.loadRoute(id);
  }

  async loadRoute(id) {
    const loaded = await this.loadRequest(id).catch(() => null);
    if (loaded === null) return;
    if (loaded.request) {
      const { request } = loaded;
      const first =
        request.ttft_s === null
          ? ""
          : ` Its first token came after ${format.duration(request.ttft_s)}. `;
      const open = html(
        "button",
        {
          type: "button",
          class: "plain more",
          on: { click: () => this.onSelect({ about: "request", id }) },
        },
        "All details",
      );
      replaceChildren(this.route, html("span", {}, words.routeWords(request), first), open);
      this.show(this.route, true);
    }
    this.drawExplanation(loaded.explanation, loaded.request?.prompt_tokens ?? null);
  }

  /** `promptTokens` is null before the gateway has read the prompt; then nothing says the route. */
  drawExplanation(explanation, promptTokens) {
    const view = explanationView(explanation, promptTokens, promptTokens === null);
    replaceChildren(this.explanation, view);
    this.show(this.explanation, true);
  }
}

async function* eventsOf(response) {
  const parser = new EventParser();
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      yield* parser.push(value);
    }
  } finally {
    // The reader may have left before the end; the connection is of no more use then.
    reader.cancel().catch(() => {});
  }
}
