"""What a parser of tool calls returns, piece by piece."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the answer that is not part of a call."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call begins. Calls are numbered from 0."""

    index: int
    name: str
    id: str | None = None  # where the model writes one


@dataclass(frozen=True, slots=True)
class ArgumentsPiece:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Piece: TypeAlias = TextPiece | CallStart | ArgumentsPiece


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same, with neighbours of one kind joined and without empty pieces."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        match last, piece:
            case TextPiece(before), TextPiece(text):
                result[-1] = TextPiece(before + text)
            case ArgumentsPiece(index, before), ArgumentsPiece(same, text) if index == same:
                result[-1] = ArgumentsPiece(index, before + text)
            case _:
                result.append(piece)
    return [piece for piece in result if isinstance(piece, CallStart) or piece.text]


def beginning_of(mark: str, text: str) -> int:
    """How many of the last characters of `text` could be the beginning of `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0


class ToolCallParser(ABC):
    """Reads one answer. Joined, the pieces do not depend on how the text was divided."""

    def __init__(self) -> None:
        self._text = ""  # not read yet
        self._calls = 0  # that have begun

    def push(self, text: str) -> list[Piece]:
        """What is certain now: text that may become a call is held back."""
        self._text += text
        pieces: list[Piece] = []
        while self._read(pieces):
            pass
        return joined(pieces)

    @abstractmethod
    def finish(self) -> list[Piece]:
        """The rest, when the answer has ended. An unfinished call stays unfinished."""

    @abstractmethod
    def _read(self, pieces: list[Piece]) -> bool:
        """Reads a part of the text. False when more text is needed."""
