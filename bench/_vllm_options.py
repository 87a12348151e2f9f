"""Options that the benchmarks of vLLM engines share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from prfaas.errors import InputError

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

python_option: Decorator = click.option(
    "--python",
    default=sys.executable,
    type=click.Path(exists=True, path_type=Path),
    help="Python interpreter with vLLM and prfaas.  [default: this one]",
)
logs_option: Decorator = click.option(
    "--logs",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for models and logs, which are kept.  [default: a temporary one]",
)


def models_option(known: Sequence[str], default: Sequence[str]) -> Decorator:
    named = "all" if list(default) == list(known) else ", ".join(default)
    return click.option(
        "--models",
        multiple=True,
        type=click.Choice(known),
        default=default,
        help=f"Model to serve; repeatable.  [default: {named}]",
    )


def lengths_option(default: Sequence[int]) -> Decorator:
    return click.option(
        "--lengths",
        default=",".join(map(str, default)),
        show_default=True,
        help="Tokens of the prompts, comma-separated.",
    )


def parse_lengths(text: str, most: int, least: int = 2) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or not all(least <= length <= most for length in lengths):
        raise InputError(
            f"{text!r} is not a list of numbers from {least} to {most}",
            where="--lengths",
            fix="give numbers like 65,129",
        )
    return lengths
