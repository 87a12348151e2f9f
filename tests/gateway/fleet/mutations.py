"""Mutated bodies of a member's responses, from a seed."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec

from prfaas.contracts.kvd_api import EngineReport
from prfaas.types import HashEvent, LinkStats, NodeId
from tests.gateway.fleet.test_polling import CARD, LOAD, PROMPT
from tests.gateway.reports import report

NAME = "bad"
_LINKS = (
    LinkStats("a:7400", 1.0, 4, 1e9, 500, 300, 0.1, 0.0, 0.02, 2e9, 3, 100),
    LinkStats("b:7400", 2.0, 0, 0.0, 0, 0),
)
_HASHES = tuple(PROMPT.at(64)[:3])
REPORT: dict[str, Any] = msgspec.to_builtins(
    msgspec.structs.replace(
        report(NAME, links=_LINKS, native="vllm-a"),
        engines=(EngineReport("e", "http://127.0.0.1:1", 1),),
        next_seq={NodeId(NAME): 3, NodeId("e"): 1},
        incoming={"granted": 1},
    )
)
_EVENT = HashEvent(0, NodeId(NAME), "full", 64, _HASHES, "stored")
PAGES: list[dict[str, Any]] = [
    msgspec.to_builtins({"node": NAME, "instance": "first", "next_seq": 1, "events": [_EVENT]}),
    msgspec.to_builtins(
        {
            **{"node": NAME, "instance": "first", "next_seq": 1, "events": []},
            "snapshot": {"full": list(_HASHES), "state": [_HASHES[-1]]},
        }
    ),
]
_DEEP: Any = []
for _ in range(500):
    _DEEP = [_DEEP]
HOSTILE: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**31, 2**53 + 1, 2**63, 2**64, -(2**70), 10**400, 0.5, -0.0),
    *(1e18, 1e19, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *("", " ", "a", "b", "x" * 20_000, "\n", "\x00", "\x1b[31m", "é\u2028", "1", "NaN", "../.."),
    *("http://a:1", "http://a:1/#", "http://" + "x" * 70 + ":1", "file:///etc/passwd", "full"),
    *([], {}, [[]], {"": None}, _DEEP, ["full", "full", [0], 64, 0], list(range(5000))),
)


def mutate(draw: random.Random, body: Any) -> bytes:
    """The JSON of `body` with one to three changes of its tree, or of its bytes."""
    tree = json.loads(json.dumps(body))
    for _ in range(draw.randint(1, 3)):
        tree = _change(draw, tree)
    data = json.dumps(tree).encode()
    return _damage(draw, data) if draw.random() < 0.2 else data


def mutate_metrics(draw: random.Random) -> bytes:
    values = ["NaN", "-Inf", "+Inf", "1e300", "-1", "0x10", "", "1 2", "1_0", "9" * 5000, "2"]
    labels = ["", "{", '{a="b"}', "{" * 5000, '{a="}"}']
    lines = [LOAD.encode()]
    for _ in range(draw.randint(1, 4)):
        name = draw.choice(["running", "waiting", "other"])
        line = f"vllm:num_requests_{name}{draw.choice(labels)} {draw.choice(values)}\n"
        lines.insert(draw.randint(0, len(lines)), line.encode())
    data = b"".join(lines)
    return _damage(draw, data) if draw.random() < 0.2 else data


def mutate_card(draw: random.Random) -> bytes:
    return mutate(draw, CARD)


def _change(draw: random.Random, tree: Any) -> Any:
    """Walks down at random, and changes what it finds there."""
    if not isinstance(tree, dict | list) or not tree or draw.random() < 0.1:
        return json.loads(json.dumps(draw.choice(HOSTILE)))  # a copy, which may be changed
    key = draw.choice(list(tree)) if isinstance(tree, dict) else draw.randrange(len(tree))
    what = draw.random()
    many = draw.choice([2, 300, 5000]) if len(json.dumps(tree)) < 500 else 2
    if what < 0.1:
        del tree[key]
    elif what < 0.15 and isinstance(tree, list):
        tree *= many
    elif what < 0.2 and isinstance(tree, dict):
        tree |= {f"{key}{n}": tree[key] for n in range(many)}
    elif what < 0.25 and isinstance(tree, dict):
        tree[str(draw.choice(HOSTILE))[:100]] = tree[key]
    else:
        tree[key] = _change(draw, tree[key])
    return tree


def _damage(draw: random.Random, data: bytes) -> bytes:
    at = draw.randrange(len(data) + 1)
    kind = draw.randrange(4)
    if kind == 0:
        return data[:at]
    if kind == 1:
        return data[:at] + draw.randbytes(draw.randint(1, 8)) + data[at:]
    if kind == 2:
        return data[:at] + draw.randbytes(1) + data[at + 1 :]
    return data + data[at:]
