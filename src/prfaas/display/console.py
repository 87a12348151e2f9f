"""Output that commands share: consoles, JSON, and a progress bar for long work."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from prfaas.clock import Clock, MonotonicClock
from prfaas.errors import CaseFailed, InputError, PeerError
from prfaas.launch.children import ChildDied

T = TypeVar("T")


def print_json(data: Any) -> None:
    click.echo(json.dumps(data, indent=2, allow_nan=False))


def run_benchmark(main: Callable[[], Any]) -> None:
    """Runs the main function of a benchmark. An error in the input, and a process that fails, are
    one line on stderr and exit code 2. A failed case of a study is shown with its traceback."""
    try:
        main()
    except (InputError, ChildDied, PeerError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except CaseFailed as error:
        click.echo(error.text(), err=True)
        sys.exit(2)


def rounded(value: Any, digits: int) -> Any:
    """`value` with every float rounded, also inside nested dicts. NaN and infinity become None."""
    if isinstance(value, dict):
        return {key: rounded(inner, digits) for key, inner in value.items()}
    if isinstance(value, float):
        return round(value, digits) if math.isfinite(value) else None
    return value


def console() -> Console:
    # Without a terminal, rich would assume a small width and cut columns off.
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
    """Yields the items, and shows how many are done."""
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
    """Yields a function to call with the amount of work done. The bar appears on a terminal's
    stderr after `after_s` seconds, and is removed at the end."""
    clock = clock or MonotonicClock()
    started = clock.now()
    screen = screen or Console(stderr=True)
    progress = Progress(
        TextColumn(what),
        BarColumn(),
        TaskProgressColumn("{task.completed:.4g}/{task.total:.4g}"),
        TimeRemainingColumn(),
        console=screen,
        transient=True,
        disable=not screen.is_terminal,  # else a bar leaves an empty line in a log
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
