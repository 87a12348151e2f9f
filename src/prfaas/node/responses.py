"""Responses to completions and chats, whole or streamed, in OpenAI's and vLLM's form. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from prfaas.contracts.openai import ErrorBody
from prfaas.engine.api import MAX_CUTS, Finished, Prefilled
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
    opening: dict[str, Any] | None = None  # the choice in the first piece of a stream


TEXT = ResponseShape(
    "cmpl",
    "text_completion",
    "text_completion",
    whole=lambda text: {"text": text},
    piece=lambda text: {"text": text},
)
CHAT = ResponseShape(
    "chatcmpl",
    "chat.completion",
    "chat.completion.chunk",
    whole=lambda text: {"message": {"role": "assistant", "content": text}},
    piece=lambda text: {"delta": {"content": text}},
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
    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    finish_reason: str | None = None
    transfer: dict[str, Any] | None = None  # `kv_transfer_params` of the response
    report_cuts: bool = False  # there

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

    def token(self, token: int) -> str:
        """Adds a token and returns the text that is final now. A stop string ends the answer."""
        self.tokens.append(token)
        text = self.answer.push(token)
        if self.answer.stopped_by is not None:
            self.finish_reason = "stop"
        return text

    def finished(self, event: Finished) -> str:
        text = self.answer.finish()
        if self.finish_reason is None:
            stopped = self.answer.stopped_by is not None
            self.finish_reason = "stop" if stopped or event.reason == "stop" else "length"
        return text

    def usage(self) -> dict[str, Any]:
        generated = len(self.tokens)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": generated,
            "total_tokens": self.prompt_tokens + generated,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    # Whole ----------------------------------------------------------------------------------------

    def whole(self, text: str) -> dict[str, Any]:
        return {
            **self._head(self.shape.whole_object),
            "choices": [self._choice(self.shape.whole(text), self.tokens)],
            "usage": self.usage(),
            "kv_transfer_params": self.transfer,
        }

    # In pieces ------------------------------------------------------------------------------------

    def opening(self) -> bytes | None:
        """The piece before the first token, if the response has one."""
        if self.shape.opening is None:
            return None
        return self._piece([self._choice(self.shape.opening, [])])

    def piece(self, text: str, tokens: list[int]) -> bytes:
        return self._piece([self._choice(self.shape.piece(text), tokens)])

    def usage_piece(self) -> bytes:
        return self._piece([], usage=self.usage())

    def _piece(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return _event({**self._head(self.shape.piece_object), "choices": choices, **more})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}

    def _choice(self, wrapped: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": 0,
            **wrapped,
            "logprobs": None,
            "finish_reason": self.finish_reason,
            "stop_reason": self.answer.stopped_by,
        }
        if self.return_token_ids:
            choice["token_ids"] = tokens
        return choice


def error_piece(body: ErrorBody) -> bytes:
    """An error after the status line has been sent."""
    return _event(body)


def _event(data: dict[str, Any] | ErrorBody) -> bytes:
    return b"data: " + msgspec.json.encode(data) + b"\n\n"
