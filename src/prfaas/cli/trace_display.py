"""A followed request on a terminal: its waterfall and its causes. Lists of requests as tables."""

from __future__ import annotations

import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prfaas.contracts.trace_api import FollowedRequest, KeptRequests
from prfaas.tracing.sentences import duration
from prfaas.tracing.summary import RequestSummary
from prfaas.tracing.waterfall import FULL, SHORT, Row, bar, length_s, rows_of

_COLOURS = {"gateway": "cyan", "kvd": "green", "node": "magenta"}
_LABEL, _PROCESS, _SECONDS = 27, 18, 8  # the widest of each column
_LEAST_BAR = 12


def print_followed(screen: Console, found: FollowedRequest) -> None:
    for line in _headline(found.request):
        screen.print(Text(line), soft_wrap=True)
    screen.print()
    _print_waterfall(screen, rows_of(found.spans))
    screen.print()
    for number, cause in enumerate(found.causes):
        text = Text(f"{printable(cause.kind)}: ", style="bold" if number == 0 else "")
        screen.print(text.append(printable(cause.text), style="not bold"))
    for line in found.missing:
        screen.print(Text(f"No spans: {printable(line)}", style="yellow"))


def print_kept(screen: Console, kept: KeptRequests) -> None:
    lists = (("latest", kept.latest), ("slowest", kept.slowest), ("failed", kept.failed))
    for title, requests in lists:
        screen.print(_table(title, requests) if requests else Text(f"{title}: none"))


def _headline(request: RequestSummary) -> list[str]:
    ttft = "" if request.ttft_s is None else f", first token after {duration(request.ttft_s)}"
    way = request.decode
    if request.prefill != request.decode:
        way = f"{request.prefill} -> {request.decode}"
    attempts = "" if request.attempts <= 1 else f", {request.attempts} attempts"
    lines = [
        f"request {request.id}  trace {request.trace_id}",
        f"{request.outcome} after {duration(request.total_s)}{ttft}",
        f"{request.route} {way}: {request.prompt_tokens:,} prompt tokens, "
        f"{request.cached_tokens:,} cached, {request.output_tokens:,} generated{attempts}",
    ]
    if request.error:
        lines.append(f"error: {request.error}")
    return [printable(line) for line in lines]


def _print_waterfall(screen: Console, rows: Sequence[Row]) -> None:
    label = min(_LABEL, max((len(row.label) for row in rows), default=0))
    process = min(_PROCESS, max((len(row.process) for row in rows), default=0))
    width = max(_LEAST_BAR, screen.width - label - process - _SECONDS - 4)
    axis_s = length_s(rows)
    for row in rows:
        drawn = _drawable(bar(row, axis_s, width), screen)
        line = Text(_fitted(row.label, label))
        line.append(f" {drawn}", style="red" if row.error else _COLOURS[row.span.service])
        line.append(f" {duration(row.seconds):>{_SECONDS}} {_fitted(row.process, process)}")
        screen.print(line, no_wrap=True, overflow="crop", crop=True)
        if row.error:
            indent = " " * (row.depth * 2 + 2)
            error = Text(f"{indent}error: {printable(row.error)}", style="red")
            screen.print(error)


def _table(title: str, requests: Sequence[RequestSummary]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for column in ("request", "at", "outcome", "TTFT", "total", "tokens", "prefill", "decode"):
        if column == "request":
            # `prfaas trace ID` needs it: it is folded where it is too long, and never cut.
            table.add_column(column, overflow="fold")
        elif column in ("TTFT", "total", "tokens"):
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column)
    for one in requests:
        table.add_row(
            Text(printable(one.id)),
            time.strftime("%H:%M:%S", time.gmtime(one.at_s)),
            Text(printable(one.outcome)),
            "-" if one.ttft_s is None else duration(one.ttft_s),
            duration(one.total_s),
            f"{one.prompt_tokens:,}",
            Text(printable(one.prefill)),
            Text(printable(one.decode)),
        )
    return table


def printable(text: str) -> str:
    """Names and errors come from members and clients: they must not control the terminal."""
    return "".join(one if one.isprintable() else "?" for one in text)


def _fitted(text: str, width: int) -> str:
    text = printable(text)
    return text.ljust(width) if len(text) <= width else f"{text[: width - 1]}~"


def _drawable(drawn: str, screen: Console) -> str:
    if screen.encoding.lower().startswith("utf"):
        return drawn
    return drawn.replace(FULL, "#").replace(SHORT, "|")
