"""Writes a profile as catalog TOML, which `load` reads. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

from prfaas.catalog.hardware import Accelerator, DecodePoint, PrefillPoint, ProfileRecord


def profile_toml(record: ProfileRecord, accelerator: Accelerator | None = None) -> str:
    """The TOML of a profile, and of its accelerator when the built-in catalog lacks it."""
    return "\n".join([*_accelerator(accelerator), *_profile(record), ""])


def _accelerator(accelerator: Accelerator | None) -> Iterator[str]:
    if accelerator is not None:
        yield "[[accelerators]]"
        yield f"name = {_text(accelerator.name)}"
        yield f"title = {_text(accelerator.title)}"
        yield ""


def _profile(record: ProfileRecord) -> Iterator[str]:
    yield "[[profiles]]"
    yield f"model = {_text(record.model)}"
    yield f"accelerator = {_text(record.accelerator)}"
    yield f"gpus = {record.gpus}"
    yield f"engine = {_text(record.engine)}"
    yield f"status = {_text(record.status)}"
    yield f"source = {_text(record.source)}"
    yield "prefill = ["
    yield from (f"  {_prefill(point)}," for point in record.prefill)
    yield "]"
    yield "decode = ["
    yield from (f"  {_decode(point)}," for point in record.decode)
    yield "]"


def _prefill(point: PrefillPoint) -> str:
    assert point.seconds is not None, "a measured point is a time"
    cached = f", cached = {point.cached}" if point.cached else ""
    return f"{{ new = {point.new}{cached}, seconds = {_number(point.seconds)} }}"


def _decode(point: DecodePoint) -> str:
    return f"{{ batch = {point.batch}, step_s = {_number(point.step_s)} }}"


def _number(value: float) -> str:
    """Five digits exceed any clock's precision. TOML needs a digit after the point."""
    return repr(float(f"{value:.5g}"))


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
