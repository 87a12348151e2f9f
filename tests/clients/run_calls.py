"""Runs the calls of calls.json with OpenAI's Python client: `run_calls.py BASE_URL MODEL KEY`.

Prints one line of JSON for each call. run_calls.mjs does the same with the JavaScript client, and
both print the same.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import openai
from openai import OpenAI

TEXT = "Once upon a time there was a river between two towns, and only one bridge. " * 2
CALLS = Path(__file__).with_name("calls.json")


def choice_outcome(choice: Any) -> dict[str, Any]:
    """Of a completion or a chat."""
    message = getattr(choice, "message", None)
    return {
        "index": choice.index,
        "text": choice.text if message is None else message.content,
        "role": None if message is None else message.role,
        "finish_reason": choice.finish_reason,
        "logprobs": choice.logprobs and choice.logprobs.model_dump(exclude_unset=True),
    }


def usage_outcome(usage: Any) -> dict[str, int] | None:
    """Without what the caches held."""
    if usage is None:
        return None
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
    }


def whole(answer: Any) -> dict[str, Any]:
    return {
        "object": answer.object,
        "model": answer.model,
        "choices": [choice_outcome(choice) for choice in answer.choices],
        "usage": usage_outcome(answer.usage),
    }


def streamed(stream: Any, take: int | None) -> dict[str, Any]:
    """The chunks of each choice, joined."""
    choices: dict[int, dict[str, Any]] = {}
    usage, chunks = None, 0
    for chunk in stream:
        chunks += 1
        if chunks == take:
            stream.close()
            return {"taken": chunks}
        usage = usage_outcome(chunk.usage) or usage
        for choice in chunk.choices:
            joined = choices.setdefault(choice.index, {"text": "", "role": None, "logprobs": 0})
            delta = getattr(choice, "delta", None)
            joined["text"] += (choice.text if delta is None else delta.content) or ""
            joined["role"] = joined["role"] or (None if delta is None else delta.role)
            joined["finish_reason"] = choice.finish_reason
            if choice.logprobs is not None:
                joined["logprobs"] += len(choice.logprobs.token_logprobs or ())
    return {"choices": {str(index): choices[index] for index in sorted(choices)}, "usage": usage}


def failed(error: openai.APIStatusError) -> dict[str, Any]:
    body = error.body if isinstance(error.body, dict) else {}
    return {
        "error": type(error).__name__,
        "status": error.status_code,
        "code": error.code,
        "param": error.param,
        "type": error.type,
        "message": body.get("message"),
    }


def perform(client: OpenAI, call: dict[str, Any], model: str) -> Any:
    if call["method"] == "models.list":
        return [one.id for one in client.models.list()]
    if call["method"] == "models.retrieve":
        return client.models.retrieve(call["id"]).id
    endpoint: Any = client.chat.completions if call["method"] == "chat" else client.completions
    arguments = {"model": model, **call["arguments"]}
    answer = endpoint.create(**arguments, extra_body=call.get("extra"))
    return streamed(answer, call.get("take")) if arguments.get("stream") else whole(answer)


def main(base_url: str, model: str, key: str) -> None:
    calls = json.loads(CALLS.read_text().replace("$TEXT", TEXT))
    with OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
        for call in calls:
            try:
                outcome = perform(client, call, model)
            except openai.APIStatusError as error:
                outcome = failed(error)
            sys.stdout.write(json.dumps({"name": call["name"], "outcome": outcome}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
