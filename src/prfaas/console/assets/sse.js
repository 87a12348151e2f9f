// Reads server-sent events from pieces of text. `EventSource` cannot send a POST, so the prompt box
// reads its answer with fetch() and this. Pure.

export class EventParser {
  constructor() {
    this.rest = "";
  }

  /** The events that the text completes: [{event, data}]. */
  push(text) {
    this.rest = (this.rest + text).replace(/\r\n/g, "\n");
    const blocks = this.rest.split("\n\n");
    this.rest = blocks.pop();
    return blocks.map(parseBlock).filter((found) => found.data !== "");
  }
}

function parseBlock(block) {
  const found = { event: "message", data: [] };
  for (const line of block.split("\n")) {
    const colon = line.indexOf(":");
    if (colon <= 0) continue; // a comment, or a field without a value
    const value = line.slice(colon + 1).replace(/^ /, "");
    if (line.startsWith("event")) found.event = value;
    else if (line.startsWith("data")) found.data.push(value);
  }
  return { event: found.event, data: found.data.join("\n") };
}

/** The text of one chunk of OpenAI's stream, of completions or of chat. */
export function textOf(chunk) {
  const choice = chunk.choices?.[0];
  return choice?.text ?? choice?.delta?.content ?? "";
}
