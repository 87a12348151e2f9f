"""The line of one request in the log, within a bound. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prfaas.service.logging import encode_line

MOST_BYTES = 2_048  # of a line, with its time, its logger and its line break
# For what is before and after the fields: the text format has 50 bytes there, JSON some 130.
_AROUND_BYTES = 192
FIELD_BYTES = MOST_BYTES - _AROUND_BYTES
_KEPT_FAILURES = 4  # the latest say most
_ERROR_BYTES, _FAILURE_BYTES, _TEXT_BYTES = 400, 120, 56
_LISTS = ("prompts", "failures")


def fitting(fields: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """The fields as they are, or so shortened that their JSON has at most `FIELD_BYTES`; and the
    JSON. The prompts of a list that are left out are counted in `prompts_left_out`."""
    found = dict(fields)
    for shorten in (_as_given, _shorten_errors, _leave_out_prompts, _shorten_texts):
        found = shorten(found)
        text = encode_line(found)
        if len(text.encode()) <= FIELD_BYTES:
            break
    return found, text


def _as_given(fields: dict[str, Any]) -> dict[str, Any]:
    return fields


def _shorten_errors(fields: dict[str, Any]) -> dict[str, Any]:
    found = dict(fields)
    if "error" in found:
        found["error"] = _cut(found["error"], _ERROR_BYTES)
    if "failures" in found:
        latest = found["failures"][-_KEPT_FAILURES:]
        found["failures"] = [_cut(failure, _FAILURE_BYTES) for failure in latest]
    return found


def _leave_out_prompts(fields: dict[str, Any]) -> dict[str, Any]:
    """Leaves out as few prompts as possible, from the end."""
    prompts = fields.get("prompts")
    if not prompts:
        return fields
    bare = {**fields, "prompts": [], "prompts_left_out": len(prompts)}
    room = FIELD_BYTES - len(encode_line(bare).encode())
    kept = 0
    for prompt in prompts:
        room -= len(encode_line(prompt).encode()) + 1
        if room < 0:
            break
        kept += 1
    return {**bare, "prompts": prompts[:kept], "prompts_left_out": len(prompts) - kept}


def _shorten_texts(fields: dict[str, Any]) -> dict[str, Any]:
    """The last resort: with these bounds the names and all texts together are below the limit."""
    found = {name: value for name, value in fields.items() if name not in _LISTS}
    return {
        name: _cut(value, _TEXT_BYTES) if isinstance(value, str) else value
        for name, value in found.items()
    }


def _cut(text: str, most_bytes: int) -> str:
    """As much of the text as has at most so many bytes in JSON, where one character may have
    six."""
    if len(encode_line({"": text}).encode()) - 5 <= most_bytes:
        return text
    kept, size = [], 3  # of the dots
    for character in text:
        size += len(encode_line({"": character}).encode()) - 5
        if size > most_bytes:
            break
        kept.append(character)
    return f"{''.join(kept)}..."
