"""Mutations of bytes and of structured values. A mutation copies what it changes."""

from __future__ import annotations

import random
from typing import Any

# Where a size, a count or an identifier is likely to be handled wrongly.
INTEGERS = (
    *(-1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 40, 255, 256, 4096, 65_535, 1 << 20),
    *(2**31 - 1, 2**31, 2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1),
    *(-2, -4, -(2**31), -(2**53), -(2**63)),
)
FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-300, 1e9, 1e308, float("inf"), float("-inf"), float("nan"))
STRINGS = (
    *("", "x", "full0", "linear0", "../..", "a b", "\x00", "\n", "é", "\u2028", "\U0001f600"),
    *("127.0.0.1:1", "127.0.0.1:0", "[::1]:1", ":1", "a:", "127.0.0.1:" + "1" * 5_000),
    *("a" * 70 + ".example:1", ".:1", "\x00:1", "http://127.0.0.1:1", "http://[", "http://a:b"),
    *("9" * 5_000, "x" * 5_000, "00000000-0000-0000-0000-000000000000", "-1", "nan"),
)
BYTES = (b"", b"\x00", b"x", b"\xff" * 32, bytes(32), b"\xc1" * 7, b"y" * 5_000)
EMPTY: tuple[Any, ...] = (None, True, False, (), {})


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    mutant = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(mutant)) if mutant else 0
        match rng.randrange(5):
            case 0 | 1 if mutant:
                mutant[at] = rng.randrange(256)
            case 2:
                mutant[at:at] = rng.randbytes(rng.randint(1, 20))
            case 3:
                del mutant[at : at + rng.randint(1, 20)]
            case _:
                mutant[at : at + 4] = rng.choice((b"\xff" * 4, bytes(4), b"\x7f\xff\xff\xff"))
    return bytes(mutant)


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
    elif chance < 0.92:
        del mutant[key]
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
    chance = rng.random()
    if chance < 0.03:
        return nested(rng.choice((10, 200, 3_000)))
    return rng.choice(rng.choice(kinds))


def nested(depth: int) -> Any:
    """Deeper than a parser that recurses without a limit can read."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value
