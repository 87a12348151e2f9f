"""Sizes in bytes with a unit: 4GiB, 500MB, 1048576."""

from __future__ import annotations

import re

from prfaas.errors import InputError

_UNITS = {
    "": 1,
    "B": 1,
    **{f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)},
    **{f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)},
}


def parse_bytes(text: str, where: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    unit = _UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None or float(match[1]) <= 0:
        raise InputError(f"{text!r} is not a size", where=where, fix="write it like 4GiB or 500MB")
    return int(float(match[1]) * unit)


def format_bytes(nbytes: int) -> str:
    """The size in GiB where that is a whole number, else in bytes."""
    return f"{nbytes >> 30}GiB" if nbytes % (1 << 30) == 0 else str(nbytes)
