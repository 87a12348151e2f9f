"""Incremental detokenising, and stop strings that end the text. Pure.

A token may end in the middle of a character, and a stop string may span tokens. So text is returned
only when it can no longer change and can no longer become part of a stop string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

Decode: TypeAlias = Callable[[Sequence[int]], str]

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what a decoder writes for part of a character
# A character has at most four bytes, and a token that adds to the text has at least one.
_UNFINISHED_BYTES = 3
_HELD_TOKENS = 4


class Detokenizer:
    """Returns text piece by piece; the concatenation of the pieces is the decoded whole.

        ids   (dropped) | the last piece | held |
                                         ^ given

    Decoders may treat a first token specially (a leading space), so every piece is decoded
    together with the piece before it, whose text is then cut off. Both are short, whatever the
    tokens are: what several tokens leave unfinished is not a character, except for its end.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._given = 0
        self._text = ""  # of these ids
        self._known = 0  # its first characters, which have been given out

    def push(self, token: int) -> str:
        text = self._decode([*self._ids, token])
        if self._ids and text == self._text and not self._decode([token]):
            return ""  # a token without text, such as a special one: no piece needs it
        self._ids.append(token)
        self._text = text
        if len(text) > self._known and not text.endswith(UNFINISHED):
            return self._give_all(self._ids[self._given :])
        if len(self._ids) - self._given > _HELD_TOKENS:
            return self._give_decided()
        return ""

    def finish(self) -> str:
        """The rest of the text. An unfinished character stays a replacement character."""
        return self._text[self._known :]

    def _give_all(self, kept: list[int]) -> str:
        """`kept`: only the ids that the next piece needs, so that a long answer costs no more per
        token."""
        piece = self._text[self._known :]
        self._ids, self._given = kept, len(kept)
        self._text = self._decode(kept)
        self._known = len(self._text)
        return piece

    def _give_decided(self) -> str:
        """All but the replacement characters that may be the beginning of one character."""
        kept = self._ids[: self._given] + self._ids[-_UNFINISHED_BYTES:]
        text = self._decode(kept)
        new = len(self._text) - self._known
        undecided = min(_UNFINISHED_BYTES, new, _unfinished(self._text), _unfinished(text))
        if undecided <= 0:
            return self._give_all(kept)
        piece = self._text[self._known : len(self._text) - undecided]
        self._ids, self._text = kept, text
        self._known = len(text) - undecided
        return piece


def _unfinished(text: str) -> int:
    """Replacement characters at its end."""
    return len(text) - len(text.rstrip(UNFINISHED))


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
        self._stops = tuple(map(_StopString, stops))
        self._include_stop = include_stop
        self._free_tokens = min_tokens
        self._held = ""  # may be the beginning of a stop string
        self.stopped_by: str | None = None

    def push(self, token: int) -> str:
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        may_stop, self._free_tokens = self._free_tokens <= 0, self._free_tokens - 1
        return self._released(self._detokenizer.push(token), may_stop)

    def finish(self) -> str:
        if self._detokenizer is None or self.stopped_by is not None:
            return ""
        text = self._released(self._detokenizer.finish(), self._free_tokens < 0)
        rest, self._held = self._held, ""
        return text + rest

    def _released(self, piece: str, may_stop: bool) -> str:
        text = self._held + piece
        first: int | None = None  # where a stop string is complete, in the piece
        for stop in self._stops:
            # The one that is complete first ends the text; of several, the first of the request.
            end = stop.read(piece if first is None else piece[: first - 1])
            if end is not None and may_stop:
                first, self.stopped_by = end, stop.text
        if first is not None and self.stopped_by is not None:
            keep = 0 if self._include_stop else len(self.stopped_by)
            text, self._held = text[: len(self._held) + first], ""
            return text[: len(text) - keep]
        keep = max((stop.matched for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


class _StopString:
    """Reads a text piece by piece, each character once, and knows how much of the stop string the
    text ends with: the algorithm of Knuth, Morris and Pratt. Its table grows with the matches, so
    that a long stop string costs nothing before the text has its beginning."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0  # last characters of what was read that begin the stop string
        # For each beginning of the stop string, the longest shorter beginning that it ends with.
        self._shorter = [0]

    def read(self, piece: str) -> int | None:
        """Where in the piece the stop string is complete for the first time."""
        found: int | None = None
        at = 0
        while at < len(piece):
            if not self.matched:
                at = piece.find(self.text[0], at)
                if at < 0:
                    break
            at += 1
            if self._is_complete_with(piece[at - 1]) and found is None:
                found = at
        return found

    def _is_complete_with(self, character: str) -> bool:
        self.matched = self._extended(self.matched, character)
        if self.matched < len(self.text):
            if self.matched > len(self._shorter):
                self._shorter.append(self._extended(self._shorter[-1], character))
            return False
        self.matched = self._extended(self._shorter[-1], character) if self.matched > 1 else 0
        return True

    def _extended(self, matched: int, character: str) -> int:
        """How much is matched with one character more."""
        while self.text[matched] != character:
            if not matched:
                return 0
            matched = self._shorter[matched - 1]
        return matched + 1
