"""The form in which goldens are kept and compared.

JSON has sorted keys, and its floats have few significant digits, because the last digits of a
float differ between machines. A comparison allows a difference of one in the last digit that is
kept, so that a value between two roundings fails nowhere. Text is kept as it is, apart from floats
with more digits than that.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

DIGITS = 9
_WIDTH = 100
# A decimal number with so many digits comes from a calculation.
_LONG_FLOAT = re.compile(r"(?<![\w.])-?\d+\.\d{6,}(?:[eE][-+]?\d+)?(?![\w.])")


class Precision(NamedTuple):
    """How exactly the floats of an area are kept and compared."""

    digits: int = DIGITS  # significant ones
    # A difference that is allowed besides: of zeros, and where decimals are cut off.
    absolute: float = 1e-12


class Golden(NamedTuple):
    """One recorded file: its name in the folder of its area, and text or plain data."""

    name: str  # `.txt` for text, `.json` for data
    content: Any


def rounded(value: float, digits: int) -> float | str:
    if not math.isfinite(value):
        return str(value)
    short = float(f"{value:.{digits - 1}e}")
    return short + 0.0  # no negative zero


def canonical(value: Any, digits: int) -> Any:
    """Plain data with rounded floats; keys are text."""
    if isinstance(value, Mapping):
        return {str(key): canonical(inner, digits) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(inner, digits) for inner in value]
    if isinstance(value, float):
        return rounded(value, digits)
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _with_short_floats(str(value), digits)
    raise TypeError(f"{type(value).__name__} is not plain data")


def canonical_text(text: str, digits: int) -> str:
    """The text with shorter floats, and without spaces at the ends of lines."""
    short = _with_short_floats(text, digits)
    return "".join(f"{line.rstrip()}\n" for line in short.splitlines())


def _with_short_floats(text: str, digits: int) -> str:
    return _LONG_FLOAT.sub(lambda found: f"{float(found[0]):.{digits}g}", text)


def text_of(golden: Golden, precision: Precision) -> str:
    """The recorded file."""
    if golden.name.endswith(".txt"):
        return canonical_text(golden.content, precision.digits)
    return f"{_json(canonical(golden.content, precision.digits), 0)}\n"


def _json(value: Any, depth: int) -> str:
    """What fits into a line is one; everything else has a line for each row or key. Long lists of
    plain values are wrapped."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False)
    indent = "  " * (depth + 1)
    if len(line) + 2 * depth <= _WIDTH or not isinstance(value, list | dict):
        return line
    if isinstance(value, dict):
        rows = [f"{json.dumps(k)}: {_json(v, depth + 1)}" for k, v in sorted(value.items())]
        return "{\n" + ",\n".join(f"{indent}{row}" for row in rows) + f"\n{'  ' * depth}}}"
    if any(isinstance(inner, list | dict) for inner in value):
        # A table: one row per line, whatever its length.
        plain = all(_is_row(inner) for inner in value)
        rows = [json.dumps(v, ensure_ascii=False) if plain else _json(v, depth + 1) for v in value]
        return "[\n" + ",\n".join(f"{indent}{row}" for row in rows) + f"\n{'  ' * depth}]"
    lines, current = [], ""
    for inner in value:
        word = json.dumps(inner, ensure_ascii=False)
        if current and len(current) + len(word) + len(indent) + 2 > _WIDTH:
            lines.append(f"{current},")
            current = word
        else:
            current = f"{current}, {word}" if current else word
    return "[\n" + "".join(f"{indent}{one}\n" for one in [*lines, current]) + f"{'  ' * depth}]"


def _is_row(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(inner, list | dict) for inner in value)


# Differences -------------------------------------------------------------------------------------


def differences(recorded: str, golden: Golden, precision: Precision) -> list[str]:
    """Each difference on a line, the first one in the file first. Empty: the golden holds."""
    found = text_of(golden, precision)
    if recorded == found:
        return []
    if golden.name.endswith(".txt"):
        lines = difflib.unified_diff(
            recorded.splitlines(), found.splitlines(), "recorded", "now", lineterm="", n=1
        )
        return list(lines)[2:]
    return list(_differences(json.loads(recorded), json.loads(found), "", precision))


def _differences(recorded: Any, found: Any, at: str, precision: Precision) -> Iterator[str]:
    where = at or "the whole file"
    if isinstance(recorded, dict) and isinstance(found, dict):
        for key in sorted({*recorded, *found}):
            inner = f"{at}.{key}" if at else key
            if key not in found:
                yield f"{inner}: is missing now; recorded: {_short(recorded[key])}"
            elif key not in recorded:
                yield f"{inner}: is new: {_short(found[key])}"
            elif key == "rows" and recorded.get("columns") == found.get("columns"):
                columns = recorded.get("columns")
                before, now = _named(recorded[key], columns), _named(found[key], columns)
                yield from _differences(before, now, inner, precision)
            else:
                yield from _differences(recorded[key], found[key], inner, precision)
    elif isinstance(recorded, list) and isinstance(found, list):
        if len(recorded) != len(found):
            yield f"{where}: {len(recorded)} entries were recorded, now {len(found)}"
        for number, pair in enumerate(zip(recorded, found, strict=False)):
            yield from _differences(*pair, f"{at}[{number}]", precision)
    elif not _equal(recorded, found, precision):
        yield f"{where}: recorded {_short(recorded)}, now {_short(found)}"


def _named(rows: Any, columns: list[str] | None) -> Any:
    """The rows of a table, with the names of its columns."""
    return rows if columns is None else [dict(zip(columns, row, strict=True)) for row in rows]


def _equal(recorded: Any, found: Any, precision: Precision) -> bool:
    if isinstance(recorded, float) and isinstance(found, float):
        last_digit = 1.5 * 10.0 ** (1 - precision.digits)
        return math.isclose(recorded, found, rel_tol=last_digit, abs_tol=precision.absolute)
    return type(recorded) is type(found) and bool(recorded == found)


def _short(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}... ({len(text)} characters)"
