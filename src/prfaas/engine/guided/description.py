"""What an answer must look like, as a request states it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Kind: TypeAlias = Literal["json", "regex", "choice", "grammar", "lark"]

# Of a schema, an expression or a grammar. One of 2,000 properties has 110 KB and compiles in 2 s.
MAX_CHARACTERS = 128 << 10


@dataclass(frozen=True, slots=True)
class GrammarDescription:
    """`kind` says what `text` is: a JSON schema, a regular expression, a JSON list of strings, a
    grammar in Lark's or GBNF's notation, or a grammar in Lark's notation that this process wrote.
    """

    kind: Kind
    text: str
    field: str  # of the request, for errors
    any_whitespace: bool = True  # between the values of a JSON text; False: none
    whitespace_pattern: str | None = None  # an expression for it, instead of JSON's own

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for descriptions of the same answers."""
        return (self.kind, self.text, str(self.any_whitespace), repr(self.whitespace_pattern))
