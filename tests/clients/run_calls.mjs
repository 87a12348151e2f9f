// Runs the calls of calls.json with OpenAI's JavaScript client: `node run_calls.mjs BASE_URL MODEL KEY`.
//
// Prints one line of JSON for each call. run_calls.py does the same with the Python client, and both
// print the same.

import { readFileSync } from "node:fs";
import OpenAI from "openai";

const TEXT = "Once upon a time there was a river between two towns, and only one bridge. ".repeat(2);

// Of a completion or a chat.
function choiceOutcome(choice) {
  const message = choice.message;
  return {
    index: choice.index,
    text: message === undefined ? choice.text : message.content,
    role: message === undefined ? null : message.role,
    finish_reason: choice.finish_reason,
    logprobs: choice.logprobs ?? null,
  };
}

// Without what the caches held.
function usageOutcome(usage) {
  if (!usage) return null;
  const { prompt_tokens, completion_tokens, total_tokens } = usage;
  return { prompt_tokens, completion_tokens, total_tokens };
}

function whole(answer) {
  return {
    object: answer.object,
    model: answer.model,
    choices: answer.choices.map(choiceOutcome),
    usage: usageOutcome(answer.usage),
  };
}

// The chunks of each choice, joined.
async function streamed(stream, take) {
  const choices = {};
  let usage = null;
  let chunks = 0;
  for await (const chunk of stream) {
    chunks += 1;
    if (chunks === take) {
      stream.controller.abort();
      return { taken: chunks };
    }
    usage = usageOutcome(chunk.usage) ?? usage;
    for (const choice of chunk.choices) {
      choices[choice.index] ??= { text: "", role: null, logprobs: 0 };
      const joined = choices[choice.index];
      joined.text += (choice.delta === undefined ? choice.text : choice.delta.content) ?? "";
      joined.role ??= choice.delta?.role ?? null;
      joined.finish_reason = choice.finish_reason;
      joined.logprobs += choice.logprobs?.token_logprobs?.length ?? 0;
    }
  }
  return { choices, usage };
}

function failed(error) {
  return {
    error: error.constructor.name,
    status: error.status,
    code: error.code ?? null,
    param: error.param ?? null,
    type: error.type ?? null,
    message: error.error?.message ?? null,
  };
}

async function perform(client, call, model) {
  if (call.method === "models.list") {
    const ids = [];
    for await (const one of client.models.list()) ids.push(one.id);
    return ids;
  }
  if (call.method === "models.retrieve") return (await client.models.retrieve(call.id)).id;
  const endpoint = call.method === "chat" ? client.chat.completions : client.completions;
  const body = { model, ...call.arguments, ...call.extra };
  const answer = await endpoint.create(body);
  return body.stream ? streamed(answer, call.take) : whole(answer);
}

const [baseURL, model, apiKey] = process.argv.slice(2);
const text = readFileSync(new URL("calls.json", import.meta.url), "utf8");
const calls = JSON.parse(text.replaceAll("$TEXT", TEXT));
const client = new OpenAI({ baseURL, apiKey, maxRetries: 0 });
for (const call of calls) {
  let outcome;
  try {
    outcome = await perform(client, call, model);
  } catch (error) {
    if (!(error instanceof OpenAI.APIError) || error.status === undefined) throw error;
    outcome = failed(error);
  }
  console.log(JSON.stringify({ name: call.name, outcome }));
}
