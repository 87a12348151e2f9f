from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prfaas.contracts.kvd_api import OTHER_PROMPT
from prfaas.errors import ConnectionLost, InputError, TransferFailed
from prfaas.kvd.engine_socket import client
from prfaas.kvd.engine_socket.messages import (
    Abort,
    Commit,
    Flush,
    FrameReader,
    NumberedCall,
    Refused,
    Release,
    decode_answer,
    frame,
)
from prfaas.kvd.process import KvdOptions, run_kvd
from prfaas.kvd.store import StoreOptions
from prfaas.kvspec import Segment
from prfaas.types import Grant, NotNow, TransferId
from tests.cache.builders import SPECS
from tests.kvd.hosts import (
    COMPAT,
    Host,
    assert_holds,
    begun,
    fill,
    kvd,
    kvd_process,
    names,
    prompt_of,
)
from tests.waiting import PATIENCE_S, wait_until

PROMPT = prompt_of(40)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with kvd(tmp_path) as host:
        yield host


def keep(host: Host, prompt: list[int], name: str = "engine") -> None:
    with host.engine(name) as engine:
        lease = begun(engine.begin(names(prompt), len(prompt)))
        fill(lease, prompt)
        lease.commit()


def test_a_prefix_outlives_the_engine_that_computed_it(host: Host) -> None:
    keep(host, PROMPT, "first")
    with host.engine("second") as engine:
        with begun(engine.pin(names(PROMPT))) as found:
            assert found.tokens == 40
            assert_holds(found, PROMPT, 40)
        longer = [*PROMPT, 1, 2, 3]
        lease = begun(engine.begin(names(longer), len(longer)))
        assert (lease.match_tokens, lease.skip_tokens["full1"]) == (40, 40)
        assert_holds(lease, longer, 40)
        lease.abort("enough")
        lease.abort("again")
    assert host.in_use() == (0, 0)


def test_an_engine_that_does_not_match_gets_the_differences(host: Host) -> None:
    with host.engine():
        other = msgspec.structs.replace(COMPAT, kv_dtype="float8", tensor_parallel=2)
        with pytest.raises(InputError, match="kv_dtype: bytes here, float8 there; tensor_parallel"):
            host.engine("other", compat=other)
        with pytest.raises(InputError, match="groups: .*linear0.* here"):
            host.engine("other", spec=SPECS["full"])
        with pytest.raises(InputError, match="block_tokens: 4 here, 8 there"):
            host.engine("other", block_tokens=8)
        with host.engine("rank 1"):
            assert [e["processes"] for e in host.stats()["engines"]] == [1, 1]


def test_an_upgraded_engine_does_not_get_the_state_of_the_one_before_it(host: Host) -> None:
    """The kvd has survived its engine, and has its prefixes: their names do not have the model's
    revision. The new engine is refused until the kvd restarts, too."""
    keep(host, PROMPT, "first")
    upgraded = msgspec.structs.replace(COMPAT, revision="a new one")
    with pytest.raises(InputError, match="revision: .* there.*restart the kvd"):
        host.engine("second", compat=upgraded)
    with host.engine("third") as engine, begun(engine.pin(names(PROMPT))) as found:
        assert found.tokens == 40, "an engine of the old revision finds them"


def test_incomplete_state_is_not_committed(host: Host) -> None:
    with host.engine() as engine:
        lease = begun(engine.begin(names(PROMPT), 40))
        fill(lease, PROMPT, stop=32)
        with pytest.raises(InputError, match="is not ready"):
            lease.commit()
        assert host.in_use() == (0, 0)
        with begun(engine.pin(names(PROMPT))) as found:
            assert found.tokens == 0


def test_a_lease_is_reserved_whole_or_not_at_all(tmp_path: Path) -> None:
    with kvd(tmp_path, store=StoreOptions(memory_bytes=3_000)) as host, host.engine() as engine:
        before = host.stats()["pool"]["occupancy"]
        refused = engine.begin(names(prompt_of(400)), 400)
        assert isinstance(refused, NotNow) and "more than the pool has" in refused.reason
        assert isinstance(host.open(prompt_of(400)), NotNow)
        assert host.stats()["pool"]["occupancy"] == before
        begun(engine.begin(names(PROMPT), 40))
        busy = host.open(prompt_of(40, seed=1))
        assert isinstance(busy, NotNow) and "no room" in busy.reason
        assert 0 <= busy.retry_after_s < 3600


def test_ssd_serves_what_memory_could_not_keep(tmp_path: Path) -> None:
    store = StoreOptions(memory_bytes=5_000, ssd=tmp_path, ssd_bytes=1 << 20)
    with kvd(tmp_path, store=store) as host:
        for seed in range(6):
            keep(host, prompt_of(40, seed=seed))
        counters = host.stats()["pool"]["counters"]
        assert counters["spilled_blocks"] > 0 and counters["evicted_blocks"] == 0
        with host.engine() as engine:
            for seed in range(6):
                with begun(engine.pin(names(prompt_of(40, seed=seed)))) as found:
                    assert found.tokens == 40
                    assert_holds(found, prompt_of(40, seed=seed), 40)
            assert host.stats()["pool"]["counters"]["promoted_blocks"] > 0


def test_processes_of_one_engine_share_a_lease(host: Host) -> None:
    with host.engine("scheduler") as owner, host.engine("worker") as worker:
        lease = begun(owner.begin(names(PROMPT), 40))
        joined = worker.join_write(lease.ticket)
        fill(joined, PROMPT)
        worker.flush()
        with pytest.raises(TransferFailed, match="another process"):
            joined.commit()
        lease.commit()
        found = begun(owner.pin(names(PROMPT)))
        assert_holds(worker.join_read(found.ticket), PROMPT, 40)
        found.release()
        with pytest.raises(TransferFailed, match="has ended"):
            worker.join_read(found.ticket)
    assert host.in_use() == (0, 0)


def test_pages_wait_for_the_last_process_that_writes(host: Host) -> None:
    with host.engine("worker") as worker:
        with host.engine("scheduler") as owner:
            lease = begun(owner.begin(names(PROMPT), 40))
            worker.join_write(lease.ticket)
        wait_until(lambda: len(host.stats()["engines"]) == 1)
        assert host.in_use()[1] == 1  # the worker may still be writing
    wait_until(lambda: host.in_use() == (0, 0))


def test_a_kvd_that_does_not_run_does_not_stop_the_steps_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine's step reports segments without waiting for an answer. When the kvd gets no CPU,
    the socket's buffer fills, and the report must end as a call does."""
    monkeypatch.setattr(client, "SEND_S", 0.3)
    with kvd_process(tmp_path) as host, host.engine() as engine:
        lease = begun(engine.begin(names(PROMPT), 40))

        def report() -> None:
            while not lease.lost:
                lease.ready(Segment("full0", 0, 0, 4))

        step = threading.Thread(target=report, daemon=True)
        os.kill(host.process.pid, signal.SIGSTOP)
        try:
            step.start()
            step.join(PATIENCE_S / 4)
            assert not step.is_alive(), "the step waits for the kvd"
            with pytest.raises(ConnectionLost):
                lease.commit()
        finally:
            os.kill(host.process.pid, signal.SIGCONT)
        monkeypatch.undo()
        wait_until(lambda: host.in_use() == (0, 0))
        wait_until(lambda: engine.connected)


def test_an_answer_that_came_during_a_pause_of_the_engine_counts(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads of a process go on at once after it: the one that waits for an answer finds that
    its time is over, perhaps before the one that reads has run."""
    with host.engine() as engine:
        monkeypatch.setattr(client, "ANSWER_S", -1.0)  # it is over from the beginning
        monkeypatch.setattr(client, "_HAND_OVER_S", PATIENCE_S)
        for _ in range(100):
            engine.flush()
        assert engine.connected


def test_attaching_an_unknown_or_unfinished_transfer_fails(host: Host) -> None:
    with host.engine() as engine:
        with pytest.raises(TransferFailed, match="not known here"):
            engine.attach(TransferId("unknown"))
        with pytest.raises(TransferFailed, match="not committed yet"):
            engine.attach(host.grant(PROMPT).transfer_id)


def test_a_call_for_the_other_kind_of_lease_ends_nothing(host: Host) -> None:
    """The lease would be held by no process, and its pages by nothing that could release them."""
    keep(host, PROMPT)
    with host.engine() as engine:
        read, written = begun(engine.pin(names(PROMPT))), begun(engine.begin(names(PROMPT), 40))
        connection = engine._connected()
        read_id, written_id = read.ticket.lease_id, written.ticket.lease_id
        for call in (Commit(read_id), Abort(read_id, "wrong"), Release(written_id)):
            with pytest.raises(TransferFailed, match="has ended, or another"):
                connection.call(call)
        assert host.stats()["held_leases"] == 2
    wait_until(lambda: host.in_use() == (0, 0))


@pytest.mark.parametrize("problem", ["", OTHER_PROMPT])
def test_the_status_has_why_an_engine_could_not_use_a_transfer(host: Host, problem: str) -> None:
    keep(host, PROMPT)
    with host.engine() as engine:
        grant = host.grant(PROMPT)  # the pool has every byte: it is committed at once
        engine.attach(grant.transfer_id).release(problem)  # type: ignore[arg-type]
        found = host.transfer(grant)
        assert (found["state"], found["reason"]) == ("released", problem)
    assert host.in_use() == (0, 0)


def test_a_segment_outside_the_lease_has_no_place(host: Host) -> None:
    with host.engine() as engine:
        lease = begun(engine.begin(names(PROMPT), 40))
        with pytest.raises(InputError, match="not part of this lease"):
            lease.buffers(Segment("full0", 0, 40, 44))
        with pytest.raises(InputError, match="not part of this lease"):
            lease.views(Segment("full0", 0, 0, 4))
        lease.ready(
            Segment("full0", 99, 0, 4)
        )  # not a layer of this model: the kvd logs it and ignores it
        engine.flush()


def test_a_call_that_no_frame_can_carry_fails_alone(host: Host) -> None:
    grant = Grant(TransferId("t"), "token", "h:1", {}, 1 << 70, 60.0)
    with host.engine() as engine:
        lease = begun(engine.begin(names(PROMPT), 40))
        with pytest.raises(InputError, match="cannot be sent to the kvd"):
            engine.begin(names(PROMPT), 40, grant=grant)
        fill(lease, PROMPT)
        lease.commit()
    assert host.in_use() == (0, 0)


def test_without_a_kvd(tmp_path: Path) -> None:
    with kvd(tmp_path) as host:
        engine = host.engine()
    with pytest.raises(ConnectionLost, match=r"kvd\.sock"):
        engine.pin([])
    engine.close()
    with pytest.raises(ConnectionLost, match="closed"):
        engine.pin([])


def test_a_client_reconnects_to_a_restarted_kvd_without_a_call(tmp_path: Path) -> None:
    with kvd(tmp_path) as host:
        engine = host.engine()
    with engine, kvd(tmp_path) as anew:
        wait_until(lambda: len(anew.stats()["engines"]) == 1)


def test_an_invalid_client_is_disconnected(host: Host) -> None:
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(host.socket))
        stranger.sendall(frame(NumberedCall(1, Flush())))
        (body,) = FrameReader().feed(stranger.recv(4096))
        answer = decode_answer(body).answer
        assert isinstance(answer, Refused) and "registration" in answer.problem
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(4096) == b""


async def test_a_socket_has_one_kvd(host: Host) -> None:
    with pytest.raises(InputError, match="another process listens on this socket"):
        async with run_kvd(KvdOptions(socket=host.socket)):
            raise AssertionError("two kvds on one socket")
    with host.engine():  # the first one still serves
        pass
