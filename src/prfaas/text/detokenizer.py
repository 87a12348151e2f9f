"""Incremental detokenising, and stop strings that end the text. Pure.

A token may end in the middle of a character, and a stop string may span tokens. So text is returned
only when it can no longer change and can no longer become part of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for part of a character


class Detokenizer:
    """Returns text piece by piece; the concatenation of the pieces is the decoded whole.

        ids   (dropped) | the last piece | held |
                                         ^ given

    Decoders may treat a first token specially (a leading space), so every piece is decoded
    together with the piece before it, whose text is then cut off.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        text, known = self._pending()
        if len(text) <= known or text.endswith(UNFINISHED):
            return ""
        # Keep only the ids that the next piece needs: a long answer costs no more per token.
        self._ids = self._ids[self._given :]
        self._given = len(self._ids)
        return text[known:]

    def finish(self) -> str:
        """The rest of the text. An unfinished character stays a replacement character."""
        text, known = self._pending()
        return text[known:]

    def _pending(self) -> tuple[str, int]:
        known = len(self._decode(self._ids[: self._given]))
        return self._decode(self._ids), known


class AnswerText:
    """The text of one answer, in pieces to send, until a stop string ends it."""

    def __init__(
        self,
        decode: Decode | None,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
    ) -> None:
        """Without `decode` the answer has tokens and no text. `include_stop`: the text ends after
        the stop string instead of before it. A stop string that ends within the first `min_tokens`
        tokens is text like any other."""
        assert decode is not None or not stops
        self._detokenizer = Detokenizer(decode) if decode is not None else None
        self._stops = tuple(stops)
        self._include_stop = include_stop
        self._free_tokens = min_tokens
        self._held = ""  # may be the beginning of a stop string
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        may_stop, self._free_tokens = self._free_tokens <= 0, self._free_tokens - 1
        return self._released(self._held + self._detokenizer.push(token), may_stop)

    def finish(self) -> str:
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        text = self._released(self._held + self._detokenizer.finish(), self._free_tokens < 0)
        rest, self._held = self._held, ""
        return text + rest

    def _released(self, text: str, may_stop: bool) -> str:
        ends = [(text.index(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if ends and may_stop:
            # The one that is complete first; of several, the first one of the request.
            end, self.stopped_by = min(ends, key=lambda found: found[0])
            self._held = ""
            return text[: end if self._include_stop else end - len(self.stopped_by)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` could be the beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
