"""Damaged bytes and JSON values. Pure: everything follows from the random numbers."""

from __future__ import annotations

import json
import random
from typing import Any

_DEEP: Any = []
for _ in range(300):
    _DEEP = [_DEEP]
# Where a size, a count, a name or an address is likely to be handled wrongly.
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0),
    *(1e18, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("", " ", "x" * 20_000, "\n", "\x00", "\x1b[31m", "é\u2028", "1", "NaN", "../.."),
    *("http://a:1", "http://a:1/#", f"http://{'x' * 70}:1", "file:///etc/passwd", "127.0.0.1:1"),
    *([], {}, [[]], {"": None}, _DEEP, list(range(2000))),
)


def mutate_json(value: Any, draw: random.Random) -> bytes:
    """The JSON of `value` with one to three parts changed, or with damaged bytes."""
    tree = json.loads(json.dumps(value))
    for _ in range(draw.randint(1, 3)):
        tree = _changed(tree, draw)
    data = json.dumps(tree).encode("utf-8", "surrogatepass")
    return mutate_bytes(data, draw) if draw.random() < 0.2 else data


def _changed(tree: Any, draw: random.Random) -> Any:
    if not isinstance(tree, dict | list) or not tree or draw.random() < 0.1:
        return json.loads(json.dumps(draw.choice(VALUES)))
    key: Any = draw.choice(list(tree)) if isinstance(tree, dict) else draw.randrange(len(tree))
    chance = draw.random()
    if chance < 0.1:
        del tree[key]
    elif chance < 0.15 and isinstance(tree, list):
        tree.append(tree[key])
    elif chance < 0.2 and isinstance(tree, dict):
        tree |= {f"{key}{n}": tree[key] for n in range(draw.choice((1, 50)))}
    else:
        tree[key] = _changed(tree[key], draw)
    return tree


def mutate_bytes(data: bytes, draw: random.Random) -> bytes:
    mutant = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        # Mostly near the beginning, where headers have their lengths.
        near = min(len(mutant), 64) if draw.random() < 0.7 else len(mutant)
        at = draw.randrange(near) if near else 0
        match draw.randrange(4):
            case 0 if mutant:
                mutant[at] = draw.randrange(256)
            case 1:
                mutant[at:at] = draw.randbytes(draw.randint(1, 20))
            case 2:
                del mutant[at : at + draw.randint(1, 20)]
            case _:
                mutant[at : at + 4] = draw.choice((b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f"))
    return bytes(mutant)
