"""Pages of the documentation whose tables are results: their blocks are replaced by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

import click


def fill(text: str, sections: dict[str, Sequence[str]]) -> str:
    """Replaces what is between `<!-- begin NAME -->` and `<!-- end NAME -->`."""
    for name, lines in sections.items():
        pattern = re.compile(
            rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.DOTALL
        )
        if not pattern.search(text):
            raise click.ClickException(f"no place for {name!r} in the page")
        body = "\n".join(lines) + "\n"
        text = pattern.sub(lambda found, body=body: found[1] + body + found[2], text)  # type: ignore[misc]
    return text
