"""Strict decoding of TOML into frozen structs: an error is one line that names file, key and fix.

msgspec checks types and refuses unknown keys. This module rewrites its messages in the notation of
TOML, suggests the nearest known key for an unknown one, and refuses NaN and infinity, which TOML
allows. It does not depend on the meaning of the structs.
"""

from __future__ import annotations

import copy
import difflib
import math
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prfaas.errors import InputError

T = TypeVar("T")


def read_text(path: str | Path) -> str:
    """The file's text. Raises `InputError` where the file cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError("no such file", file=path, fix="check the path") from None
    except IsADirectoryError:
        raise InputError("is a directory", file=path, fix="name a file in it") from None
    except PermissionError:
        raise InputError(
            "permission to read it is denied", file=path, fix="check its permissions"
        ) from None
    except UnicodeDecodeError:
        raise InputError("is not UTF-8 text", file=path, fix="save it as UTF-8") from None


def parse_toml(text: str, file: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"not valid TOML: {error}", file=file, fix="correct that line") from None


def decode(raw: dict[str, Any], kind: type[T], file: str | Path) -> T:
    """Converts `raw` to a `kind`. Raises `InputError` with the dotted name of a wrong key."""
    _refuse_non_finite(raw, "", file)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _rewritten(str(error), raw, kind, file) from None


_AT = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<key>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<key>[^`]*)`")


def _rewritten(message: str, raw: dict[str, Any], kind: type[Any], file: str | Path) -> InputError:
    at = _AT.search(message)
    parts = _parts(at["path"], message, raw, kind) if at else []
    path = ".".join(parts)  # the notation of --set, --sweep and our errors
    problem = message[: at.start()] if at else message
    if unknown := _UNKNOWN.match(problem):
        key = unknown["key"]
        known = _known_keys(msgspec.json.schema(kind), parts, raw)
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        fix = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return InputError("unknown key", file=file, where=_join(path, key), fix=fix)
    if missing := _MISSING.match(problem):
        return InputError("is missing", file=file, where=_join(path, missing["key"]), fix="add it")
    value = _at(raw, parts)
    shown = f"{problem[0].lower()}{problem[1:]}"
    advice: str | None = None
    if problem.startswith("Invalid"):
        advice = f"use one of: {', '.join(_choices(msgspec.json.schema(kind), parts, raw))}"
    elif path:
        shown = f"{re.sub(r', got `[a-z]+`$', '', shown)}, got {value!r}"
        if isinstance(value, str) and ("`float`" in problem or "`int`" in problem):
            advice = "give a plain number in the unit of the key's name"
    return InputError(shown, file=file, where=path or None, fix=advice)


def _parts(path: str, message: str, raw: dict[str, Any], kind: type[Any]) -> list[str]:
    """`.clusters[0].gpus` as the keys `clusters`, `0`, `gpus`. msgspec writes `[...]` for the name
    of an entry of a table whose names are free."""
    parts = [key or index for key, index in _STEP.findall(path)]
    while "..." in parts:
        place = parts.index("...")
        parts[place] = _wrong_entry(parts[:place], message, raw, kind)
    return parts


def _wrong_entry(parts: list[str], message: str, raw: dict[str, Any], kind: type[Any]) -> str:
    """The name of the entry of this table that the message is about."""
    table = _at(raw, parts)
    for name in table:
        alone = copy.deepcopy(raw)
        entries = _at(alone, parts)
        for other in table:
            if other != name:
                del entries[other]
        try:
            msgspec.convert(alone, kind)
        except msgspec.ValidationError as error:
            if str(error) == message:
                return str(name)
    return "?"  # two entries are wrong only together, which no type of ours says


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _at(raw: Any, parts: list[str]) -> Any:
    for part in parts:
        if isinstance(raw, list) and part.isdigit() and int(part) < len(raw):
            raw = raw[int(part)]
        elif isinstance(raw, dict) and part in raw:
            raw = raw[part]
        else:
            return None
    return raw


class _Schema:
    """The JSON schema of a struct, followed along a document."""

    def __init__(self, schema: dict[str, Any], raw: Any) -> None:
        self._definitions = schema.get("$defs", {})
        self._node, self._raw = schema, raw

    def step(self, part: str) -> None:
        node = self.resolved()
        self._raw = _at(self._raw, [part])
        if node.get("type") == "array":
            self._node = node["items"]
        else:
            unknown = node.get("additionalProperties") or {}
            self._node = node.get("properties", {}).get(part, unknown)

    def resolved(self) -> dict[str, Any]:
        """The object at this place; for a tagged union, the branch of the document's tag."""
        node = self._node
        while "$ref" in node or "anyOf" in node:
            if "$ref" in node:
                node = self._definitions[node["$ref"].rsplit("/", 1)[-1]]
            else:
                tag = node.get("discriminator", {})
                chosen = tag.get("mapping", {}).get(_at(self._raw, [tag.get("propertyName", "")]))
                some = [option for option in node["anyOf"] if option.get("type") != "null"]
                node = {"$ref": chosen} if chosen else some[0]
        return node

    def tags(self, part: str) -> list[str]:
        """The values of the tag named `part`, where this place is a tagged union."""
        tag = self._node.get("discriminator", {})
        return list(tag.get("mapping", {})) if tag.get("propertyName") == part else []

    def enumerated(self) -> list[str]:
        options = [self._node, *self._node.get("anyOf", [])]
        return [str(value) for option in options for value in option.get("enum", [])]


def _known_keys(schema: dict[str, Any], parts: list[str], raw: Any) -> list[str]:
    at = _Schema(schema, raw)
    for part in parts:
        at.step(part)
    return list(at.resolved().get("properties", {}))


def _choices(schema: dict[str, Any], parts: list[str], raw: Any) -> list[str]:
    at = _Schema(schema, raw)
    for part in parts[:-1]:
        at.step(part)
    if tags := at.tags(parts[-1]):
        return tags
    at.step(parts[-1])
    return at.enumerated()


def _refuse_non_finite(value: Any, path: str, file: str | Path) -> None:
    if isinstance(value, dict):
        for key, child in value.items():
            _refuse_non_finite(child, _join(path, key), file)
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _refuse_non_finite(child, _join(path, str(index)), file)
    elif isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"is {value}", file=file, where=path, fix="give a finite number")
