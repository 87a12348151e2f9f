"""Messages that no correct client sends: the kvd refuses each of them alone and keeps nothing."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.contracts.kvd_api import PushPrefix, shapes_of
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.messages import (
    Answer,
    Call,
    Commit,
    Done,
    Flush,
    FrameReader,
    LeaseTicket,
    NumberedCall,
    Pin,
    Publish,
    Refused,
    Register,
    Registered,
    Release,
    decode_answer,
    frame,
)
from prfaas.kvd.events import EventLog
from prfaas.kvd.store import Store, StoreOptions
from prfaas.types import Grant, NodeId, TransferId
from tests.cache.builders import BLOCK
from tests.kvd.hosts import COMPAT, SPEC, Host, kvd, names, prompt_of
from tests.waiting import PATIENCE_S

PROMPT = prompt_of(40)
REGISTER = Register("engine", shapes_of(SPEC), BLOCK, COMPAT)


class RawEngine:
    """An engine that sends any bytes."""

    def __init__(self, host: Host) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(host.socket))
        self._frames = FrameReader()

    def __enter__(self) -> RawEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def call(self, call: Call | dict[str, Any] | bytes) -> Answer:
        """The answer. ConnectionError when the kvd closes the connection."""
        if not isinstance(call, bytes):
            call = msgspec.msgpack.encode([7, call])
        self.sock.sendall(len(call).to_bytes(4, "big") + call)
        while True:
            data, descriptors, _, _ = socket.recv_fds(self.sock, 1 << 16, 4)
            for descriptor in descriptors:
                os.close(descriptor)
            if not data:
                raise ConnectionError("the kvd has closed the connection")
            for body in self._frames.feed(data):
                numbered = decode_answer(body)
                assert numbered.number == 7 and not hasattr(numbered.answer, "reason")
                return numbered.answer


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with kvd(tmp_path, node="pool") as host:
        yield host


@pytest.fixture
def engine(host: Host) -> Iterator[RawEngine]:
    with RawEngine(host) as engine:
        assert isinstance(engine.call(REGISTER), Registered)
        yield engine


def registration(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(REGISTER)
    return {**plain, **changes}


# Engines -----------------------------------------------------------------------------------------


def test_a_lease_that_is_ended_with_the_wrong_call_stays_with_its_owner(
    host: Host, engine: RawEngine
) -> None:
    ticket = engine.call(Pin(tuple(names(PROMPT))))
    assert isinstance(ticket, LeaseTicket)
    assert isinstance(engine.call(Commit(ticket.lease_id)), Refused)
    assert isinstance(engine.call(Release(ticket.lease_id)), Done)
    assert host.in_use() == (0, 0)


@pytest.mark.parametrize(
    "groups",
    [
        [["full", "full0", [0], -8, 0]],
        [["full", "full0", [0], 0, 0]],
        [["full", "full0", [], 8, 0]],
        [["full", "full0", [0, 0], 8, 0]],
        [["full", "full0", [-1], 8, 0]],
        [["full", "full/0", [0], 8, 0]],
        [["window", "window0", [0], 8, 0]],
        [["full", "full0", [0], 8, 0], ["full", "full0", [1], 8, 0]],
        [["full", f"full{at}", [at], 8, 0] for at in range(1_000)],
    ],
    ids=str,
)
def test_a_registration_without_a_possible_model_is_refused(host: Host, groups: list[Any]) -> None:
    with RawEngine(host) as engine:
        refused = engine.call(registration(groups=groups))
        assert isinstance(refused, Refused) and refused.kind == "input", refused
        assert isinstance(engine.call(REGISTER), Registered)


def test_an_invalid_call_does_not_end_the_other_leases_of_its_process(
    host: Host, engine: RawEngine
) -> None:
    ticket = engine.call(Pin(tuple(names(PROMPT))))
    assert isinstance(ticket, LeaseTicket)
    for invalid in ({"type": "begin", "tokens": "x"}, {"type": "unknown"}, {"type": "pin"}):
        refused = engine.call(invalid)
        assert isinstance(refused, Refused) and "invalid" in refused.problem
    assert isinstance(engine.call(Release(ticket.lease_id)), Done)


@pytest.mark.parametrize("depth", [5_000, 1_000_000])
def test_a_frame_that_is_nested_too_deeply_closes_its_connection_only(
    host: Host, engine: RawEngine, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    # How deep a frame can be read depends on the version of Python.
    with suppress(ConnectionError):
        engine.call(b"\x92\x07\x82\xa4type\xa5flush\xa1x" + b"\x91" * depth + b"\xc0")
    with RawEngine(host) as other:
        assert isinstance(other.call(REGISTER), Registered)
    assert [record.levelname for record in caplog.records if record.levelno >= 40] == []


def test_an_engine_cannot_take_the_name_of_its_kvd(host: Host) -> None:
    with RawEngine(host) as engine:
        refused = engine.call(registration(engine_id=host.stats()["node"]))
        assert isinstance(refused, Refused) and "name of this kvd" in refused.problem
        assert isinstance(engine.call(REGISTER), Registered)


def test_a_process_registers_once(engine: RawEngine) -> None:
    again = engine.call(registration(engine_id="other"))
    assert isinstance(again, Refused) and "registered already" in again.problem
    assert isinstance(engine.call(Flush()), Done)


@pytest.mark.parametrize(
    ("payload", "group_names"),
    [
        (b"\x91" * 5_000 + b"\xc0", {0: "full0"}),
        (b"", {0: "full0", 2**40: "full1"}),
        (b"", {0: "full0", -1: "full1"}),
        (b"", {0: ()}),
        (b"", {0: ("full0",) * 100}),
    ],
    ids=["nested", "huge group", "negative group", "no name", "many names"],
)
def test_events_that_no_engine_publishes_harm_only_themselves(
    engine: RawEngine, payload: bytes, group_names: Mapping[int, str | tuple[str, ...]]
) -> None:
    group = max(group_names, key=abs)
    stored = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [1] * BLOCK,
        "block_size": BLOCK,
        "group_idx": group,
    }
    payload = payload or msgspec.msgpack.encode([0.0, [stored], 0])
    engine.call(msgspec.to_builtins(Publish(payload, group_names), builtin_types=(bytes,)))
    assert isinstance(engine.call(Flush()), Done)


@pytest.mark.parametrize("block_tokens", [-1, 2 * BLOCK, 2**62, "64"])
def test_events_in_blocks_that_the_pool_does_not_have_are_refused(
    engine: RawEngine, block_tokens: object
) -> None:
    call = msgspec.to_builtins(Publish(b"", {0: "full0"}), builtin_types=(bytes,))
    refused = engine.call(call | {"block_tokens": block_tokens})
    assert isinstance(refused, Refused) and "block_tokens" in refused.problem
    assert isinstance(engine.call(Flush()), Done)


def test_a_process_that_reads_no_answers_cannot_fill_the_memory_of_the_kvd(
    engine: RawEngine,
) -> None:
    """The kvd stops reading from it. The buffers of a Unix socket hold less than a megabyte."""
    calls = frame(NumberedCall(7, Commit(1))) * 1_000
    engine.sock.settimeout(3.0)
    with pytest.raises(TimeoutError):
        for _ in range(400):
            engine.sock.sendall(calls)


def test_a_failed_registration_leaves_no_descriptor(tmp_path: Path) -> None:
    options = StoreOptions(memory_bytes=1 << 16, ssd=tmp_path / "missing" / "file")
    store = Store(NodeId("pool"), options, EventLog("instance"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with pytest.raises(InputError, match="--ssd"):
            store.register(REGISTER)
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_arena_that_the_machine_cannot_hold_is_refused() -> None:
    options = StoreOptions(memory_bytes=1 << 62)
    store = Store(NodeId("pool"), options, EventLog("instance"))
    with pytest.raises(InputError, match="--memory"):
        store.register(REGISTER)


# HTTP --------------------------------------------------------------------------------------------


def test_a_grant_with_a_port_of_a_thousand_digits_is_a_bad_request(
    host: Host, engine: RawEngine
) -> None:
    address = "127.0.0.1:" + "1" * 5_000
    grant = Grant(TransferId("x"), "token", address, {}, 10, 1.0)
    status, answer = host.post("/v1/push", PushPrefix((), COMPAT, grant))
    assert status == 400, answer
    assert host.in_use() == (0, 0)


def test_a_request_that_is_not_http_is_one_line_of_the_log(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_connection(("127.0.0.1", int(host.url.rpartition(":")[2]))) as sock:
        sock.settimeout(PATIENCE_S)
        sock.sendall(b"GET /v1/role HTTP/1.1\r\nContent-Length: -1\r\n\r\n")
        assert sock.makefile("rb").read().startswith(b"HTTP/1.0 400")
    (record,) = [r for r in caplog.records if r.name == "aiohttp.server"]
    assert record.levelname == "WARNING" and record.exc_info is None
