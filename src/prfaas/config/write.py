"""Writes a deployment as TOML that `load_deployment` reads back. Pure.

Keys with their default value are left out, so that the file shows what differs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from prfaas.config.deployment import Deployment


def deployment_toml(deployment: Deployment) -> str:
    return toml(sparse(deployment))


def toml(data: Mapping[str, Any]) -> str:
    """Plain values first, then a table or an array of tables for each other value. Deeper tables
    are inline."""
    lines = [f"{key} = {_value(value)}" for key, value in data.items() if not _is_table(value)]
    for key, value in data.items():
        if isinstance(value, Mapping):
            lines += ["", f"[{key}]", *_pairs(value)]
        elif _is_table(value):
            for entry in value:
                lines += ["", f"[[{key}]]", *_pairs(entry)]
    return "\n".join([*lines, ""]).lstrip("\n")


def _is_table(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    )


def _pairs(table: Mapping[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        yield f"{key} = {_value(value)}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(_pairs(value)) + " }"
    if isinstance(value, list):
        inner = [_value(entry) for entry in value]
        if any(isinstance(entry, Mapping) for entry in value):
            return "[\n" + "".join(f"  {entry},\n" for entry in inner) + "]"
        return "[" + ", ".join(inner) + "]"
    return repr(value)


def sparse(value: Any) -> Any:
    """Structs as dictionaries of the file's keys, without defaults and without None."""
    if isinstance(value, dict):
        return {key: sparse(entry) for key, entry in value.items()}
    if not isinstance(value, msgspec.Struct):
        return [sparse(entry) for entry in value] if isinstance(value, list) else value
    config = value.__struct_config__
    found: dict[str, Any] = {}
    if config.tag is not None:
        assert config.tag_field is not None
        found[config.tag_field] = config.tag
    for field in msgspec.structs.fields(value):
        held = getattr(value, field.name)
        default = field.default
        if field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if held is not None and held != default:
            found[field.encode_name] = sparse(held)
    return found
