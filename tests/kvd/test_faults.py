"""Whatever breaks: no wrong byte is ever attached, and every page comes back on both sides."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from prfaas.config.address import parse_address
from prfaas.config.host import KvdTimeouts
from prfaas.engine.emulated.content import Content
from prfaas.errors import ConnectionLost, TransferFailed
from prfaas.kvd.store import StoreOptions
from prfaas.kvspec import Segment
from prfaas.transport.link import TransferLink
from prfaas.types import Grant, NotNow
from prfaas_lab.faults.worker_processes import children_of, send_signal
from prfaas_lab.testing import FakeClock
from tests.kvd.hosts import (
    SPEC,
    Host,
    assert_holds,
    begun,
    fill,
    kvd,
    kvd_process,
    names,
    prompt_of,
)
from tests.transport.proxy import Proxy
from tests.waiting import PATIENCE_S, wait_until

TOKENS = 40
PROMPT = prompt_of(TOKENS)


@contextmanager
def engine_process(
    host: Host, *, stop: int, grant: Grant | None
) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tests.kvd.engine_process", str(host.socket), str(TOKENS)]
    granted = [msgspec.json.encode(grant).decode()] if grant is not None else []
    process = subprocess.Popen([*command, str(stop), *granted], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "written\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_engine_killed_in_the_middle_of_a_prefill(tmp_path: Path) -> None:
    with (
        kvd(tmp_path, name="p") as here,
        kvd(tmp_path, name="d") as there,
        there.engine() as decode,
    ):
        grant = there.grant(PROMPT)
        with engine_process(here, stop=16, grant=grant) as engine:
            assert here.in_use()[1] == there.in_use()[1] == 1
            engine.send_signal(signal.SIGKILL)
            assert "the engine has exited" in there.settled(grant)["reason"]
        with pytest.raises(TransferFailed, match="the engine has exited"):
            decode.attach(grant.transfer_id)
        wait_until(lambda: here.in_use() == there.in_use() == (0, 0))
        stats = here.stats()
        assert stats["engines"] == [] and stats["held_leases"] == 0
        with here.engine() as again:  # incomplete state cannot be found
            with begun(again.pin(names(PROMPT))) as found:
                assert found.tokens == 0


def test_sender_killed_in_the_middle_of_a_transfer(tmp_path: Path) -> None:
    clock = FakeClock()
    with kvd(tmp_path, name="d", clock=clock) as there, there.engine() as decode:
        with kvd_process(tmp_path, name="p") as here, here.engine() as prefill:
            grant = there.grant(PROMPT)
            lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=grant))
            fill(lease, PROMPT, stop=16)
            wait_until(lambda: there.received_bytes() > 0)
            here.end(signal.SIGKILL)
            with pytest.raises(TransferFailed, match="exited"):
                lease.sent.result(PATIENCE_S)
            with pytest.raises(ConnectionLost):
                lease.commit()
        assert there.transfer(grant)["state"] == "granted"
        clock.advance(KvdTimeouts().grant_s + 1)
        assert "no frame arrived in time" in there.settled(grant)["reason"]
        with pytest.raises(TransferFailed):
            decode.attach(grant.transfer_id)
        assert there.in_use() == (0, 0)


@pytest.mark.slow
def test_workers_killed_in_the_middle_of_a_transfer(tmp_path: Path) -> None:
    """The kvds keep the state: the transfer goes on, and they replace their workers."""
    one_worker = ("--set", "kvd.workers=1")
    with (
        kvd_process(tmp_path, *one_worker, name="p") as here,
        kvd_process(tmp_path, *one_worker, name="d") as there,
        here.engine() as prefill,
        there.engine() as decode,
    ):
        for seed, victims in enumerate(((here,), (there,), (here, there))):
            prompt = prompt_of(TOKENS, seed)
            grant, before = there.grant(prompt), there.received_bytes()
            lease = begun(prefill.begin(names(prompt), TOKENS, grant=grant))
            fill(lease, prompt, stop=16)
            wait_until(lambda before=before: there.received_bytes() > before)
            killed = [pid for host in victims for pid in children_of(host.process.pid)]
            assert len(killed) == len(victims)
            send_signal(killed, signal.SIGKILL)
            fill(lease, prompt)
            lease.commit()
            assert there.settled(grant)["state"] == "committed"
            with decode.attach(grant.transfer_id) as state:
                assert_holds(state, prompt, TOKENS)
            for host in (here, there):
                wait_until(lambda host=host: len(children_of(host.process.pid)) == 1)
        wait_until(lambda: here.in_use() == there.in_use() == (0, 0))


def test_receiver_restarted(tmp_path: Path) -> None:
    with kvd(tmp_path, name="p") as here, here.engine() as prefill:
        with kvd_process(tmp_path, name="d") as there:
            with there.engine() as decode:
                first = there.stats()["instance"]
                grant = there.grant(PROMPT)
                lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=grant))
                fill(lease, PROMPT, stop=16)
                there.end(signal.SIGKILL)
                # The same engine continues with the new kvd, which starts empty.
                with kvd_process(tmp_path, name="d") as anew:
                    with pytest.raises(TransferFailed, match="not known here"):
                        decode.attach(grant.transfer_id)
                    assert anew.get(f"/v1/transfers/{grant.transfer_id}")[0] == 404
                    assert anew.stats()["instance"] != first
                    assert anew.in_use() == (0, 0)
        lease.abort("the receiver has gone")
        wait_until(lambda: here.in_use() == (0, 0))


def test_a_damaged_byte_is_sent_again(tmp_path: Path) -> None:
    state_begins = Content(SPEC, PROMPT).of(Segment("linear0", 1, 0, TOKENS))[:8].tobytes()
    damaged = []

    def damage(connection: int, before: int, data: bytes) -> bytes:
        if state_begins in data and not damaged:
            damaged.append(connection)
            return data.replace(state_begins, bytes(8))
        return data

    with kvd(tmp_path, name="d") as target:
        with Proxy(tuple(parse_address(target.data, "d")), forward=damage) as proxy:
            via = f"127.0.0.1:{proxy.address[1]}"
            with kvd(tmp_path, name="p") as here, here.engine() as prefill, target.engine() as dec:
                grant = msgspec.structs.replace(target.grant(PROMPT), data_address=via)
                lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=grant))
                fill(lease, PROMPT)
                lease.commit()
                assert target.settled(grant)["state"] == "committed"
                assert damaged
                with dec.attach(grant.transfer_id) as state:
                    assert_holds(state, PROMPT, TOKENS)


def test_an_unused_grant_expires(tmp_path: Path) -> None:
    options = KvdTimeouts(grant_s=0.3)
    with kvd(tmp_path, name="d", timeouts=options) as there, there.engine():
        assert "no frame arrived in time" in there.settled(there.grant(PROMPT))["reason"]
        assert there.in_use() == (0, 0)


def test_a_transfer_that_no_gateway_polls_expires(tmp_path: Path) -> None:
    options = KvdTimeouts(dispatch_s=0.3)
    with kvd(tmp_path, name="d", timeouts=options) as there, there.engine() as decode:
        with kvd(tmp_path, name="p") as here, here.engine() as prefill:
            grant = there.grant(PROMPT)
            lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=grant))
            fill(lease, PROMPT)
            lease.commit()
            lease.sent.result(PATIENCE_S)
            # No gateway polls, so the transfer expires; its prefix is complete and stays.
            wait_until(lambda: there.stats()["incoming"]["failed"] == 1)
            with pytest.raises(TransferFailed, match="no gateway asked"):
                decode.attach(grant.transfer_id)
            assert there.in_use() == (0, 0)
            with begun(decode.pin(names(PROMPT))) as state:
                assert_holds(state, PROMPT, TOKENS)


def test_aborted_between_grant_and_commit(tmp_path: Path) -> None:
    with kvd(tmp_path, name="p") as here, kvd(tmp_path, name="d") as there:
        with here.engine() as prefill, there.engine() as decode:
            grant = there.grant(PROMPT)
            lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=grant))
            fill(lease, PROMPT, stop=16)
            there.post(f"/v1/transfers/{grant.transfer_id}/abort", {"reason": "client left"})
            assert "client left" in there.settled(grant)["reason"]
            with pytest.raises(TransferFailed, match="client left"):
                lease.sent.result(PATIENCE_S)
            # The prefill is completed, and its prefix is kept here.
            fill(lease, PROMPT)
            lease.commit()
            with begun(prefill.pin(names(PROMPT))) as found:
                assert found.tokens == TOKENS
            with pytest.raises(TransferFailed, match="client left"):
                decode.attach(grant.transfer_id)
            wait_until(lambda: here.in_use() == there.in_use() == (0, 0))


def test_aborted_after_the_commit_and_after_the_attach(tmp_path: Path) -> None:
    with kvd(tmp_path, name="p") as here, kvd(tmp_path, name="d") as there:
        with here.engine() as prefill, there.engine() as decode:

            def hand_off(prompt: list[int]) -> Grant:
                grant = there.grant(prompt)
                lease = begun(prefill.begin(names(prompt), len(prompt), grant=grant))
                fill(lease, prompt)
                lease.commit()
                assert there.settled(grant)["state"] == "committed"
                return grant

            unwanted = hand_off(prompt_of(22, seed=1))
            there.post(f"/v1/transfers/{unwanted.transfer_id}/abort", {})
            with pytest.raises(TransferFailed, match="aborted by the gateway"):
                decode.attach(unwanted.transfer_id)
            wanted = hand_off(prompt_of(22, seed=2))
            with decode.attach(wanted.transfer_id) as state:
                there.post(f"/v1/transfers/{wanted.transfer_id}/abort", {})
                assert there.transfer(wanted)["state"] == "attached"
                assert_holds(state, prompt_of(22, seed=2), 22)
                with pytest.raises(TransferFailed, match="already attached"):
                    decode.attach(wanted.transfer_id)
            assert there.in_use() == (0, 0)


def test_eviction_pressure_while_a_grant_pins(tmp_path: Path) -> None:
    """Others fill the pool over and over; what the grant counts on stays, and arrives whole."""
    small = StoreOptions(memory_bytes=6_000)
    longer = [*PROMPT, *prompt_of(8, seed=9)]
    with kvd(tmp_path, name="p") as here, kvd(tmp_path, name="d", store=small) as there:
        with here.engine() as prefill, there.engine() as decode:
            kept = begun(decode.begin(names(PROMPT), TOKENS))
            fill(kept, PROMPT)
            kept.commit()
            grant = there.grant(longer)
            assert grant.skip_tokens["full0"] == TOKENS
            refused = 0
            for seed in range(20, 40):
                other = prompt_of(TOKENS, seed=seed)
                lease = decode.begin(names(other), TOKENS)
                if isinstance(lease, NotNow):
                    refused += 1
                    continue
                fill(lease, other)
                lease.commit()
            evicted = there.stats()["pool"]["counters"]["evicted_blocks"]
            assert evicted > 100, (evicted, refused)
            lease = begun(prefill.begin(names(longer), len(longer), grant=grant))
            fill(lease, longer)
            lease.commit()
            assert there.settled(grant)["state"] == "committed"
            with decode.attach(grant.transfer_id) as state:
                assert_holds(state, longer, len(longer))
            wait_until(lambda: there.in_use() == (0, 0))


def test_a_manifest_that_is_not_what_was_granted_is_refused(tmp_path: Path) -> None:
    with kvd(tmp_path) as there, there.engine():
        for sizes, problem in (
            ({"full0/0/0-40": 8 * 40}, "missing"),
            ({"full0/0/0-40": 17}, "320 are expected"),
            ({"nothing/0/0-40": 17}, "names an unknown group"),
            ({"../../etc/passwd": 17}, "not a segment name"),
        ):
            grant = there.grant(PROMPT)
            with TransferLink(parse_address(there.data, "d")) as link:
                transfer = link.open(grant, sizes)
                error = transfer.done.exception(PATIENCE_S)
            assert isinstance(error, TransferFailed) and problem in str(error)
            assert problem in there.settled(grant)["reason"]
        assert there.in_use() == (0, 0)
