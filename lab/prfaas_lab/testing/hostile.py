"""Hostile input: valid messages, of which values, shape or bytes are changed. Pure: everything
follows from the random numbers. What is changed is copied first.

`mutate` changes one part of a structured value, `mutate_bytes` damages bytes; `mutate_json` and
`mutate_msgpack` do either to a message. `of_schema` makes values that fit a schema of an OpenAPI
document.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import msgspec

# Where a size, a count or an identifier is likely to be handled wrongly.
INTEGERS = (
    *(-1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 40, 255, 256, 4096, 65_535, 1 << 20),
    *(2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**53 + 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
    *(-2, -4, -(2**31), -(2**53), -(2**63)),
)
FLOATS = (
    *(0.0, -0.0, 0.5, -1.5, 1e-300, 1e9, 1e18, 1e19, 1e308, -1e308),
    *(float("inf"), float("-inf"), float("nan")),
)
STRINGS = (
    *("", " ", "a", "b", "x", "full", "full0", "linear0", "../..", "a b", "\x00", "\n", "\x1b[31m"),
    *("é", "é\u2028", "\u2028", "\U0001f600", "1", "-1", "nan", "NaN", "file:///etc/passwd"),
    *("127.0.0.1:1", "127.0.0.1:0", "[::1]:1", ":1", "a:", "127.0.0.1:" + "1" * 5_000),
    *("a" * 70 + ".example:1", ".:1", "\x00:1", "http://127.0.0.1:1", "http://[", "http://a:b"),
    *("http://a:1", "http://a:1/#", "http://" + "x" * 70 + ":1"),
    *("9" * 5_000, "x" * 5_000, "x" * 20_000, "00000000-0000-0000-0000-000000000000"),
)
BYTES = (b"", b"\x00", b"x", b"\xff" * 32, bytes(32), b"\xc1" * 7, b"y" * 5_000)
EMPTY: tuple[Any, ...] = (None, True, False, (), {}, [[]], {"": None})
_RAW_JSON = (
    *(b"\xff", b'"\xff"', b'"\\ud800"', b"1e999", b"-1e999", b"NaN", b"-Infinity", b"007"),
    *(b"9" * 5_000, b"-" + b"9" * 70, b"[" * 5_000, b'{"a":' * 5_000, b"," * 300),
)
_JSON_VALUE = re.compile(rb'-?[0-9][0-9.eE+-]*|"[^"\\]*"|true|false|null')


# Bytes -------------------------------------------------------------------------------------------


def mutate_bytes(data: bytes, rng: random.Random, near: int | None = None) -> bytes:
    """`near`: most changes are among so many first bytes, where a header has its lengths."""
    mutant = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        reach = len(mutant)
        if near is not None and rng.random() < 0.7:
            reach = min(reach, near)
        at = rng.randrange(reach) if reach else 0
        match rng.randrange(20):
            case 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 if mutant:
                mutant[at] = rng.randrange(256)
            case 8 | 9 | 10:
                mutant[at:at] = rng.randbytes(rng.randint(1, 30))
            case 11 | 12 | 13:
                del mutant[at : at + rng.randint(1, 30)]
            case 14:
                del mutant[at:]
            case 15:
                mutant += mutant[at:]
            case 16:
                mutant = bytearray(rng.randbytes(rng.randint(0, 200)))
            case _:
                mutant[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"))
    return bytes(mutant)


def mutate_json(value: Any, rng: random.Random) -> bytes:
    """The JSON of the value with one to three parts changed, or with damaged text."""
    chance = rng.random()
    if chance < 0.7:
        for _ in range(rng.choice((1, 1, 2, 3))):
            value = mutate(value, rng)
        return as_json(value)
    data = as_json(value)
    if chance < 0.8:
        return mutate_bytes(data, rng)
    if chance < 0.85 and (quotes := list(re.finditer(b'"', data))):
        at = rng.choice(quotes).end()
        return data[:at] + b"\xff" + data[at:]  # no UTF-8, in a name or in a text
    if chance < 0.95 and (places := list(_JSON_VALUE.finditer(data))):
        place = rng.choice(places)
        return data[: place.start()] + rng.choice(_RAW_JSON) + data[place.end() :]
    depth = rng.choice((100, 5_000))
    return data[:-1] + b',"unknown":' + b"[" * depth + b"]" * depth + b"}"


def mutate_msgpack(value: Any, rng: random.Random) -> bytes:
    """The MessagePack of the value, changed in the same ways."""
    chance = rng.random()
    if chance < 0.1:
        return as_msgpack(_with_unknown_field(value, rng))
    for _ in range(rng.choice((1, 1, 2, 3))):
        value = mutate(value, rng)
    data = as_msgpack(value)
    return mutate_bytes(data, rng) if chance < 0.25 else data


def _with_unknown_field(value: Any, rng: random.Random) -> Any:
    nested_arrays = msgspec.Raw(b"\x91" * rng.choice((100, 5_000)) + b"\xc0")
    if isinstance(value, dict):
        return {**value, "unknown": nested_arrays}
    if isinstance(value, list) and value:
        return [*value[:-1], _with_unknown_field(value[-1], rng)]
    return nested_arrays


def as_json(value: Any) -> bytes:
    """Bytes as base64. A value that no JSON has, or that is nested too deeply to be encoded, is
    replaced by nested lists."""
    try:
        return msgspec.json.encode(value)
    except (OverflowError, RecursionError, TypeError, ValueError):
        pass
    try:
        return json.dumps(value).encode()
    except (RecursionError, TypeError, ValueError):
        return b"[" * 3_000 + b"]" * 3_000


def as_msgpack(value: Any) -> bytes:
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError, TypeError):
        return b"\x91" * 3_000 + b"\xc0"  # nested arrays


# Structured values -------------------------------------------------------------------------------


def mutate(value: Any, rng: random.Random) -> Any:
    """The value with one of its parts changed. Structured values are dicts, lists and tuples."""
    if isinstance(value, dict) and value:
        return _mutate_dict(value, rng)
    if isinstance(value, list | tuple) and value:
        return _mutate_list(list(value), rng)
    return _mutate_scalar(value, rng)


def _mutate_dict(value: dict[Any, Any], rng: random.Random) -> Any:
    mutant = dict(value)
    key = rng.choice(list(mutant))
    chance = rng.random()
    if chance < 0.84:
        mutant[key] = mutate(mutant[key], rng)
    elif chance < 0.91:
        del mutant[key]
    elif chance < 0.92:
        mutant |= {f"{key}{number}": mutant[key] for number in range(rng.choice((2, 300)))}
    elif chance < 0.96:
        mutant[rng.choice(rng.choice((STRINGS, INTEGERS)))] = mutant[key]
    else:
        return _other_type(rng)
    return mutant


def _mutate_list(mutant: list[Any], rng: random.Random) -> Any:
    at = rng.randrange(len(mutant))
    chance = rng.random()
    if chance < 0.6:
        mutant[at] = mutate(mutant[at], rng)
    elif chance < 0.7:
        del mutant[at]
    elif chance < 0.8:
        mutant.insert(rng.randrange(len(mutant)), mutant[at])
    elif chance < 0.85:
        rng.shuffle(mutant)
    elif chance < 0.9:
        mutant *= rng.choice((2, 3, 20))
    elif chance < 0.95:
        return mutant[:at]
    else:
        return _other_type(rng)
    return mutant


def _mutate_scalar(value: Any, rng: random.Random) -> Any:
    chance = rng.random()
    if chance < 0.06:
        return _other_type(rng)
    match value:
        case bool():
            return not value
        case int():
            return value + rng.choice((-1, 1, 4, -4)) if chance < 0.4 else rng.choice(INTEGERS)
        case float():
            return rng.choice(FLOATS)
        case str() if chance < 0.6 or not value:
            return rng.choice(STRINGS)
        case str():
            at = rng.randrange(len(value))
            return value[:at] + rng.choice(("", "x", "0", "-", "/", "é")) + value[at + 1 :]
        case bytes() if chance < 0.5 or not value:
            return rng.choice(BYTES)
        case bytes():
            return mutate_bytes(value, rng)
    return _other_type(rng)


def _other_type(rng: random.Random) -> Any:
    kinds: tuple[tuple[Any, ...], ...] = (INTEGERS, FLOATS, STRINGS, BYTES, EMPTY)
    if rng.random() < 0.03:
        return nested(rng.choice((10, 200, 3_000)))
    return rng.choice(rng.choice(kinds))


def nested(depth: int) -> Any:
    """Deeper than a parser that recurses without a limit can read."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


# Schemas -----------------------------------------------------------------------------------------


def of_schema(schema: Mapping[str, Any], document: Mapping[str, Any], rng: random.Random) -> Any:
    """A value that fits the schema of the document. A third of the optional fields is set."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return of_schema(document["components"]["schemas"][name], document, rng)
    if "anyOf" in schema:
        return of_schema(rng.choice(schema["anyOf"]), document, rng)
    if "allOf" in schema:
        parts = [of_schema(part, document, rng) for part in schema["allOf"]]
        return {name: value for part in parts for name, value in part.items()}
    if "enum" in schema:
        return rng.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    match schema.get("type"):
        case "null":
            return None
        case "boolean":
            return rng.random() < 0.5
        case "integer" | "number" as kind:
            return _number(schema, kind == "integer", rng)
        case "string":
            return rng.choice(("", "a", "some text", "é")).ljust(schema.get("minLength", 0), "x")
        case "array" if "prefixItems" in schema:
            return [of_schema(item, document, rng) for item in schema["prefixItems"]]
        case "array":
            least = schema.get("minItems", 0)
            length = rng.randint(least, min(least + 3, schema.get("maxItems", least + 3)))
            return [of_schema(schema.get("items", {}), document, rng) for _ in range(length)]
        case "object" if "properties" in schema:
            needed = schema.get("required", ())
            return {
                name: of_schema(field, document, rng)
                for name, field in schema["properties"].items()
                if name in needed or rng.random() < 0.34
            }
        case "object":
            of = schema.get("additionalProperties")
            field = of if isinstance(of, dict) else {}
            return {key: of_schema(field, document, rng) for key in "ab"[: rng.randint(0, 2)]}
    return rng.choice((None, 1, 0.5, "a", [1], {"a": 1}))


def _number(schema: Mapping[str, Any], whole: bool, rng: random.Random) -> float:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    near = [bound for bound in (low, high) if bound is not None] or [0]
    value = rng.choice(near) + rng.choice((0, 1, 2, 7, -1))
    value = max(value, low + ("exclusiveMinimum" in schema)) if low is not None else value
    value = min(value, high - ("exclusiveMaximum" in schema)) if high is not None else value
    return int(value) if whole else float(value)
