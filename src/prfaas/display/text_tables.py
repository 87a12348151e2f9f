"""Tables and notes of the terminal as plain text, for pages that say the same."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from prfaas.console.text_table import TextTable


def text_table(table: Table) -> TextTable:
    columns = [[plain(str(cell)) for cell in column.cells] for column in table.columns]
    return TextTable(
        title=plain(str(table.title or "")),
        columns=tuple(plain(str(column.header)) for column in table.columns),
        rows=tuple(zip(*columns, strict=True)),
    )


def plain(markup: str) -> str:
    return Text.from_markup(markup).plain


def sentences(notes: str) -> list[str]:
    """The lines of a list of notes, without its dashes."""
    return [line.strip().removeprefix("- ") for line in plain(notes).splitlines() if line.strip()]
