"""`--set KEY=VALUE`: one key of a configuration file, given on the command line."""

from __future__ import annotations

import tomllib
from typing import Any

from prfaas.errors import InputError


def assign(raw: dict[str, Any], text: str) -> None:
    """Applies one `--set KEY=VALUE`. The value is TOML; what is not TOML is a string."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise InputError(
            f"{text!r} is not KEY=VALUE", where="--set", fix="example: kvd.memory=8GiB"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value.strip()
    set_key(raw, key, parsed)


def set_key(raw: dict[str, Any], key: str, value: Any) -> None:
    *parents, last = key.split(".")
    at = raw
    for parent in parents:
        at = at.setdefault(parent, {})
        if not isinstance(at, dict):
            raise InputError(f"{parent!r} is not a section", where=key, fix="check the key")
    at[last] = value
