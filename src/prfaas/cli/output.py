"""What commands share in showing things: consoles, JSON, a progress bar when work takes long."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from prfaas.clock import Clock, MonotonicClock

T = TypeVar("T")


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, allow_nan=False))


def console() -> Console:
    # Away from a terminal there is no width to fit: tables keep theirs instead of losing columns.
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=120)


def with_progress(
    items: Sequence[T],
    what: str,
    *,
    after_s: float = 1.0,
    clock: Clock | None = None,
    screen: Console | None = None,
) -> Iterator[T]:
    """Yields the items; shows a bar on a terminal's stderr once they have taken longer than
    `after_s`, and removes it when done."""
    clock = clock or MonotonicClock()
    started = clock.now()
    progress = Progress(
        TextColumn(what),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=screen or Console(stderr=True),
        transient=True,
    )
    task = progress.add_task(what, total=len(items))
    running = False
    try:
        for item in items:
            yield item
            progress.advance(task)
            if not running and clock.now() - started > after_s:
                progress.start()
                running = True
    finally:
        if running:
            progress.stop()
