"""Bandwidth of links over time: `at_s,gbps` per line, optionally `at_s,gbps,from,to`.

Each line is valid from its time until the next line of the same link; 0 Gbit/s is an outage.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import NamedTuple

from prfaas.config.strict import read_text
from prfaas.errors import InputError

_FIX = "write at_s,gbps or at_s,gbps,from,to with ascending seconds and 0 Gbit/s or more"


class LinkSpeed(NamedTuple):
    at_s: float
    gbps: float
    link: tuple[str, str] | None  # None: the line names no link and applies to all


def read_link_trace(path: Path) -> list[LinkSpeed]:
    try:
        return _parse(read_text(path).splitlines())
    except InputError as error:
        raise error.in_file(path) from None


def _parse(lines: list[str]) -> list[LinkSpeed]:
    speeds: list[LinkSpeed] = []
    for number, cells in enumerate(csv.reader(lines), start=1):
        cells = [cell.strip() for cell in cells]
        if not any(cells) or (not speeds and cells[0] == "at_s"):
            continue
        speed = _line(cells, f"line {number}")
        if speeds and speed.at_s < speeds[-1].at_s:
            raise InputError(
                f"{speed.at_s:g} s comes before the line above", where=f"line {number}", fix=_FIX
            )
        speeds.append(speed)
    if not speeds:
        raise InputError("has no line", fix=_FIX)
    return speeds


def _line(cells: list[str], where: str) -> LinkSpeed:
    try:
        numbers = [float(cell) for cell in cells[:2]]
    except ValueError:
        raise InputError(
            f"{','.join(cells)!r} does not begin with two numbers", where=where, fix=_FIX
        ) from None
    if len(cells) not in (2, 4) or not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise InputError(f"{','.join(cells)!r} is not a link speed", where=where, fix=_FIX)
    return LinkSpeed(numbers[0], numbers[1], (cells[2], cells[3]) if len(cells) == 4 else None)
