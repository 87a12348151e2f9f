"""Merges the answers to a list of prompts into one answer, as vLLM gives it: choice j of prompt p
has index p * n + j, and the usage is the sum over all prompts. Pure.

Only the fields that differ between a merged answer and its parts are parsed. The text, the tokens
and the log-probabilities of a choice stay the bytes that the engine sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from prfaas.contracts.openai import Usage
from prfaas.errors import RequestError, StreamBroken

DONE = b"data: [DONE]\n\n"
# Of all bodies of one merged answer: one answer alone may have as many.
MERGED_BYTES = 256 << 20
_DATA = b"data:"
_DONE = b"data: [DONE]"
# One answer has one of each: the values of its first part.
_SHARED = ("id", "created", "model", "system_fingerprint")
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_CHOICES = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_INDEX = msgspec.json.Decoder(int)
_USAGE = msgspec.json.Decoder(Usage | None)


class _UsageSum:
    """`cached_tokens` is None until a prompt reports how many of its tokens were cached."""

    def __init__(self, prompts: int) -> None:
        self.of_prompt: list[Usage | None] = [None] * prompts
        self._cached: list[int | None] = [None] * prompts

    def set(self, prompt: int, usage: Usage, cached_tokens: int | None) -> None:
        self.of_prompt[prompt] = usage
        self._cached[prompt] = usage.cached_tokens if cached_tokens is None else cached_tokens

    def total(self) -> dict[str, Any] | None:
        """None when no engine has reported its usage."""
        reported = [usage for usage in self.of_prompt if usage is not None]
        if not reported:
            return None
        prompt = sum(usage.prompt_tokens for usage in reported)
        completion = sum(usage.completion_tokens for usage in reported)
        total: dict[str, Any] = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
        }
        cached = [tokens for tokens in self._cached if tokens is not None]
        if cached:
            total["prompt_tokens_details"] = {"cached_tokens": sum(cached)}
        return total


class AnswerMerger:
    """One merged answer in progress. `cached_tokens` of a prompt are those that the prefill of a
    hand-off has not computed; None: there was no hand-off."""

    def __init__(self, prompts: int, n: int) -> None:
        self._n = n
        self._shared: dict[str, msgspec.Raw] = {}
        self._usage = _UsageSum(prompts)
        self._last: dict[str, Any] = {}  # fields of the latest usage event
        self._bodies: list[list[dict[str, msgspec.Raw]] | None] = [None] * prompts
        self._held_bytes = 0

    def usage_of(self, prompt: int) -> Usage | None:
        return self._usage.of_prompt[prompt]

    # Streams --------------------------------------------------------------------------------------

    def events(
        self, prompt: int, events: Sequence[bytes], cached_tokens: int | None
    ) -> list[bytes]:
        """The events as the client gets them. The usage of a prompt and its [DONE] are left out:
        `closing` has those of the whole answer. Raises `StreamBroken`."""
        shown = []
        for event in events:
            if event.startswith(_DONE):
                continue
            fields = self._read(event.removeprefix(_DATA))
            usage = self._usage_in(fields)
            choices = self._choices(prompt, fields)
            if not choices and usage is not None:
                self._usage.set(prompt, usage, cached_tokens)
                self._last = {**fields}
                continue
            merged = {**fields, **self._shared, "choices": choices}
            shown.append(_DATA + b" " + msgspec.json.encode(merged) + b"\n\n")
        return shown

    def closing(self) -> list[bytes]:
        """The end of the stream: the usage of all prompts, and [DONE]."""
        total = self._usage.total()
        if total is None:
            return [DONE]
        merged = {**self._last, **self._shared, "choices": [], "usage": total}
        return [_DATA + b" " + msgspec.json.encode(merged) + b"\n\n", DONE]

    # Whole bodies ---------------------------------------------------------------------------------

    def add_body(self, prompt: int, body: bytes, cached_tokens: int | None) -> None:
        """Raises `StreamBroken` for a body that is not an answer, and `RequestError` when all
        bodies together are too long."""
        self._held_bytes += len(body)
        if self._held_bytes > MERGED_BYTES:
            raise RequestError(
                502,
                "response_too_large",
                f"the answers to the prompts of this request have more than {MERGED_BYTES} bytes",
                param="prompt",
            )
        fields = self._read(body)
        usage = self._usage_in(fields)
        if usage is not None:
            self._usage.set(prompt, usage, cached_tokens)
        self._bodies[prompt] = self._choices(prompt, fields)
        others = {name: value for name, value in fields.items() if name != "choices"}
        self._last = self._last or others

    def body(self) -> bytes:
        """Call it when the body of every prompt was added."""
        choices = [choice for body in self._bodies for choice in body or ()]
        total = self._usage.total()
        merged = {**self._last, **self._shared, "choices": choices, "usage": total}
        return msgspec.json.encode(merged)

    # Parts ----------------------------------------------------------------------------------------

    def _read(self, data: bytes) -> dict[str, msgspec.Raw]:
        fields: dict[str, msgspec.Raw] = _decoded(_FIELDS, data)
        if not self._shared:
            self._shared = {name: fields[name].copy() for name in _SHARED if name in fields}
        # What concerns the hand-off of one prompt says nothing about the others.
        fields.pop("kv_transfer_params", None)
        return fields

    def _usage_in(self, fields: dict[str, msgspec.Raw]) -> Usage | None:
        return _decoded(_USAGE, fields["usage"]) if "usage" in fields else None

    def _choices(self, prompt: int, fields: dict[str, msgspec.Raw]) -> list[dict[str, msgspec.Raw]]:
        choices = _decoded(_CHOICES, fields["choices"]) if "choices" in fields else []
        for choice in choices:
            index = _decoded(_INDEX, choice.get("index", b"0"))
            if not 0 <= index < self._n:
                raise StreamBroken(f"the engine sent choice {index} of {self._n}")
            choice["index"] = msgspec.Raw(b"%d" % (prompt * self._n + index))
        return choices


def _decoded(decoder: msgspec.json.Decoder[Any], data: bytes | msgspec.Raw) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise StreamBroken(f"the engine's answer is malformed: {error}") from None
