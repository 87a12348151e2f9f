"""What commands share in showing things: consoles, JSON, a progress bar when work takes long."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from prfaas.clock import Clock, MonotonicClock

T = TypeVar("T")


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, allow_nan=False))


def rounded(value: Any, digits: int) -> Any:
    """Every float in it, however deep; what is no number is None."""
    if isinstance(value, dict):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    if isinstance(value, float):
        return round(value, digits) if math.isfinite(value) else None
    return value


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
    """Yields the items, with a bar over their number."""
    bar = progress_bar(what, len(items), after_s=after_s, clock=clock, screen=screen)
    with bar as show:
        for done, item in enumerate(items, start=1):
            yield item
            show(done)


@contextmanager
def progress_bar(
    what: str,
    total: float,
    *,
    after_s: float = 1.0,
    clock: Clock | None = None,
    screen: Console | None = None,
) -> Iterator[Callable[[float], None]]:
    """Gives a function that is told how much is done. A bar appears on a terminal's stderr once
    that has taken longer than `after_s`, and is removed at the end."""
    clock = clock or MonotonicClock()
    started = clock.now()
    progress = Progress(
        TextColumn(what),
        BarColumn(),
        TaskProgressColumn("{task.completed:.4g}/{task.total:.4g}"),
        TimeRemainingColumn(),
        console=screen or Console(stderr=True),
        transient=True,
    )
    task = progress.add_task(what, total=total)
    running = False

    def show(done: float) -> None:
        nonlocal running
        progress.update(task, completed=done)
        if not running and clock.now() - started > after_s:
            progress.start()
            running = True

    try:
        yield show
    finally:
        if running:
            progress.stop()
