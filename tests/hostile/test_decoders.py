"""Changed messages to every function that reads the bytes of another process: it returns a message,
or raises an error of this package, which is short. Decoders are found by their signature and get
those of the recorded messages that they accept unchanged."""

from __future__ import annotations

import ast
import importlib
import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

import prfaas
from prfaas.cache.hashing.vllm_payloads import UNREADABLE
from prfaas.errors import PrfaasError
from prfaas.transport import messages as transport
from prfaas.transport.wire import HEADER_BYTES
from prfaas_lab.testing.hostile import (
    as_json,
    as_msgpack,
    mutate_bytes,
    mutate_json,
    mutate_msgpack,
)
from tests.goldens.frames import goldens as frames
from tests.goldens.messages import JSON, MSGPACK
from tests.goldens.schemas import example
from tests.transport.fuzz import read as read_frame

MESSAGES = 400  # to each decoder
READS = re.compile(r"^def (?:decode|parse_|raw_|read_)", re.M)
BYTES = ("bytes", "Body", "Buffer")  # of the first parameter
# Decoders with more parameters, which are these.
MORE: dict[str, list[tuple[Any, ...]]] = {
    "prfaas.transport.messages.decode": [
        (kind,) for kind in (transport.Hello, transport.Manifest, transport.Ended, transport.Reason)
    ],
}
# Parts of the frame that `read_frame` reads, and messages of a process to its own workers.
FRAME = ("header", "table", "sequences", "progress")
ELSEWHERE = {
    *(f"prfaas.transport.wire.parse_{part}" for part in FRAME),
    "prfaas.gateway.body_workers.messages.read_reply",
}
# What a decoder may raise besides the errors of this package: its callers expect it.
ALSO: dict[str, tuple[type[Exception], ...]] = {
    "prfaas.cache.hashing.vllm_payloads.raw_events": UNREADABLE,
}
Encode = Callable[[random.Random], bytes]


def decoders() -> Iterator[tuple[str, Callable[[bytes], Any]]]:
    yield "a frame", read_frame
    root = Path(prfaas.__file__).parent
    for file in sorted(root.rglob("*.py")):
        module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        text = file.read_text()
        for statement in ast.parse(text).body if READS.search(text) else ():
            if not isinstance(statement, ast.FunctionDef) or not _reads_bytes(statement):
                continue
            name = f"{module}.{statement.name}"
            function = getattr(importlib.import_module(module), statement.name)
            for more in MORE.get(name, [()]) if name not in ELSEWHERE else ():
                shown = "".join(f" {kind.__name__}" for kind in more)
                yield f"{name}{shown}", _with(function, more)


def _reads_bytes(found: ast.FunctionDef) -> bool:
    first = found.args.args[0].annotation if found.args.args else None
    is_decoder = READS.match(f"def {found.name}") is not None
    return is_decoder and first is not None and ast.unparse(first) in BYTES


def _with(function: Callable[..., Any], more: tuple[Any, ...]) -> Callable[[bytes], Any]:
    return lambda data: function(data, *more)


def messages() -> Iterator[tuple[bytes, Encode]]:
    """Each as it is, and changed."""
    bodies: list[Any] = [
        {"prompt": [1, 2, 3], "max_tokens": 2, "stop": ["a"], "stream": True, "user": "b"},
        {"prompt": "text", "kv_transfer_params": {"do_remote_decode": False}, "logit_bias": {}},
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "n": 1},
        {"model": "m", "tokens": [1, 2]},
        *(_plain(kind, some) for table in JSON.values() for kind in table for some in (0, 1)),
    ]
    for body in bodies:
        yield as_json(body), partial(mutate_json, body)
    for kind in (kind for table in MSGPACK.values() for kind in table):
        for body in (_plain(kind, 0), [7, _plain(kind, 0)]):
            yield as_msgpack(body), partial(mutate_msgpack, body)
    for golden in frames():
        for text in golden.content.values():
            frame = bytes.fromhex(text)
            yield frame, partial(mutate_bytes, frame, near=HEADER_BYTES)


def _plain(kind: type[msgspec.Struct], only_required: int) -> Any:
    made = example(kind, only_required=bool(only_required))
    return msgspec.to_builtins(made, builtin_types=(bytes,))


DECODERS = dict(decoders())
ALL = list(messages())


def accepts(decode: Callable[[bytes], Any], data: bytes) -> bool:
    try:
        decode(data)
    except (PrfaasError, *UNREADABLE):
        return False
    return True


@pytest.mark.parametrize("name", DECODERS)
def test_changed_messages_are_read_or_refused(name: str) -> None:
    decode, draw = DECODERS[name], random.Random(name)
    also = ALSO.get(name.partition(" ")[0], ())
    changed = [change for data, change in ALL if accepts(decode, data)]
    assert changed, f"no message in tests/goldens/messages.py is one that {name} reads"
    refused = 0
    for number in range(MESSAGES):
        data = changed[number % len(changed)](draw)
        try:
            decode(data)
        except PrfaasError as error:
            assert len(str(error)) < 20_000, name
            refused += 1
        except also:
            refused += 1
    assert refused < MESSAGES and (refused or len(changed) == len(ALL))
