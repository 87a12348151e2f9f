"""Responses to completions and chats, whole or streamed, in OpenAI's and vLLM's form. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from prfaas.contracts.openai import ErrorBody
from prfaas.engine.api import MAX_CUTS, Finished, Prefilled, Sampling, Token
from prfaas.node.logprobs import LogprobsReader, TokenEntry, chat_logprobs, completion_logprobs
from prfaas.node.structured.tool_calls import ToolCallReader
from prfaas.text import AnswerText

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class ResponseShape:
    """How a response wraps its text."""

    id_prefix: str
    whole_object: str
    piece_object: str
    whole: Callable[[str], dict[str, Any]]
    piece: Callable[[str], dict[str, Any]]
    logprobs: Callable[[Sequence[TokenEntry], int, int], dict[str, Any]]
    opening: dict[str, Any] | None = None  # the choice in the first piece of a stream


TEXT = ResponseShape(
    "cmpl",
    "text_completion",
    "text_completion",
    whole=lambda text: {"text": text},
    piece=lambda text: {"text": text},
    logprobs=completion_logprobs,
)
CHAT = ResponseShape(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text}},
    piece=lambda text: {"delta": {"content": text}},
    logprobs=chat_logprobs,
    opening={"delta": {"role": "assistant", "content": ""}},
)


@dataclass(slots=True)
class ResponseBuilder:
    """Builds one request's response from its events."""

    shape: ResponseShape
    id: str
    model: str
    created_s: int
    prompt_tokens: int
    return_token_ids: bool
    answer: AnswerText
    sampling: Sampling
    include_stop: bool = False  # a stop token's text is part of the answer
    logprobs: LogprobsReader | None = None
    echo: str = ""  # the prompt's text, before the answer's
    continuous_usage: bool = False  # every piece has the usage of its choice so far
    tokens: list[int] = field(default_factory=list)
    entries: list[TokenEntry] = field(default_factory=list)  # of these tokens, with `logprobs`
    sent_tokens: int = 0  # of these, in pieces so far
    sent_characters: int = 0  # of their entries
    stop_reason: str | int | None = None
    cached_tokens: int = 0
    finish_reason: str | None = None
    transfer: dict[str, Any] | None = None  # `kv_transfer_params` of the response
    report_cuts: bool = False  # there
    index: int = 0  # of the choice
    counts_prompt: bool = True  # in the usage: the first continuation of a prompt does
    prompt_logprobs: list[dict[str, Any] | None] | None = None
    prompt_entries: Sequence[TokenEntry] = ()  # with `echo` and `logprobs`
    calls: ToolCallReader | None = None  # of a chat with tools

    def prefilled(self, event: Prefilled) -> None:
        self.cached_tokens = event.resumed_tokens
        if self.report_cuts:
            resumed = (event.resumed_tokens,) if event.resumed_tokens else ()
            cuts = (*resumed, *event.cut_tokens)
            # Without a computed token the cached state is all there is. Otherwise no cuts mean that
            # the engine does not report them.
            known = bool(event.cut_tokens) or not event.computed_tokens
            if known and len(cuts) <= MAX_CUTS:
                self.transfer = {**(self.transfer or {}), "cut_tokens": cuts}

    def token(self, token: Token) -> str:
        """Adds a token and returns the text that is final now. A stop string ends the answer."""
        if self.logprobs is not None:
            self.entries.append(self.logprobs.entry(token, self.tokens))
        self.tokens.append(token.id)
        if token.is_stop and token.id in self.sampling.stop_token_ids:
            self.stop_reason = token.id
        if token.is_stop and not self.include_stop:
            return ""
        return self._read_calls(self._with_stop(self.answer.push(token.id)))

    def finished(self, event: Finished) -> str:
        text = self._with_stop(self.answer.finish())
        if self.finish_reason is None:
            self.finish_reason = "stop" if event.reason == "stop" else "length"
        return self._read_calls(text)

    def _with_stop(self, text: str) -> str:
        if self.answer.stopped_by is not None:
            self.finish_reason, self.stop_reason = "stop", self.answer.stopped_by
        return text

    def _read_calls(self, text: str) -> str:
        """Empty while the text may become a tool call."""
        if self.calls is None:
            return text
        has_news = self.calls.read(text, is_end=self.finish_reason is not None)
        if self.finish_reason == "stop" and self.calls.ends_with_calls:
            self.finish_reason = "tool_calls"
        return text if has_news else ""

    # Whole ----------------------------------------------------------------------------------------

    def whole(self, text: str) -> dict[str, Any]:
        """The response, if this is its only choice."""
        entries = [*self.prompt_entries, *self.entries]
        choice = self._choice(self._whole_answer(text), entries)
        response = {
            **self._head(self.shape.whole_object),
            "choices": [choice],
            "usage": usage([self]),
            "kv_transfer_params": self.transfer,
        }
        if self.prompt_logprobs is not None:
            owner = response if self.shape is CHAT else choice
            owner["prompt_logprobs"] = self.prompt_logprobs
        return response

    def _whole_answer(self, text: str) -> dict[str, Any]:
        if self.calls is not None:
            return {"message": self.calls.message()}
        return self.shape.whole(self.echo + text)

    # In pieces ------------------------------------------------------------------------------------

    def opening(self) -> bytes | None:
        """The piece before the first token, if the response has one."""
        if self.echo or self.prompt_entries:
            choice = self._choice(self.shape.piece(self.echo), self.prompt_entries)
            self.sent_characters += sum(len(entry.text) for entry in self.prompt_entries)
            return self._piece([choice], **self._usage_so_far())
        if self.shape.opening is None:
            return None
        return self._piece([self._choice(self.shape.opening)], **self._usage_so_far())

    def piece(self, text: str) -> bytes:
        """The text, with the tokens since the last piece."""
        entries = self.entries[self.sent_tokens :]
        wrapped = {"delta": self.calls.delta()} if self.calls is not None else None
        choice = self._choice(wrapped or self.shape.piece(text), entries)
        piece = self._piece([choice], **self._usage_so_far())
        self.sent_characters += sum(len(entry.text) for entry in entries)
        self.sent_tokens = len(self.tokens)
        return piece

    def usage_piece(self, builders: Sequence[ResponseBuilder]) -> bytes:
        """`builders`: of all choices."""
        return self._piece([], usage=usage(builders))

    def _usage_so_far(self) -> dict[str, Any]:
        """As in vLLM, of this choice alone and without what was cached."""
        if not self.continuous_usage:
            return {}
        generated = len(self.tokens)
        tokens = {"prompt_tokens": self.prompt_tokens, "completion_tokens": generated}
        return {"usage": {**tokens, "total_tokens": self.prompt_tokens + generated}}

    def _piece(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _event({**self._head(self.shape.piece_object), "choices": choices, **more})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}

    def _choice(
        self, wrapped: dict[str, Any], entries: Sequence[TokenEntry] = ()
    ) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": self.index,
            **wrapped,
            "logprobs": self._logprobs(entries),
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_reason,
        }
        if self.return_token_ids:
            choice["token_ids"] = self.tokens[self.sent_tokens :]
        return choice

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        if self.logprobs is None or not entries:
            return None
        return self.shape.logprobs(entries, self.sent_characters, self.logprobs.count)


def whole_response(builders: Sequence[ResponseBuilder], texts: Sequence[str]) -> dict[str, Any]:
    """The response with all choices."""
    response, *others = (one.whole(text) for one, text in zip(builders, texts, strict=True))
    for other in others:
        response["choices"] += other["choices"]
    return {**response, "usage": usage(builders)}


def usage(builders: Sequence[ResponseBuilder]) -> dict[str, Any]:
    """Of all choices: each prompt counts once, whatever the number of its continuations."""
    prompts = [builder for builder in builders if builder.counts_prompt]
    prompt_tokens = sum(builder.prompt_tokens for builder in prompts)
    generated = sum(len(builder.tokens) for builder in builders)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "prompt_tokens_details": {"cached_tokens": sum(one.cached_tokens for one in prompts)},
    }


def error_piece(body: ErrorBody) -> bytes:
    """An error after the status line has been sent."""
    return _event(body)


def _event(data: dict[str, Any] | ErrorBody) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
