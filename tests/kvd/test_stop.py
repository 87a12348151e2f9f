"""The probes of a kvd, and how it stops: it is not ready any more, grants nothing new, finishes its
transfers, and ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec

from prfaas.config.address import Address, parse_address
from prfaas.kvd.process import KvdOptions, run_kvd
from prfaas.kvd.store import StoreOptions
from prfaas.types import NotNow
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.descriptors import low_limit, soft_limit
from tests.kvd.hosts import (
    MEMORY_BYTES,
    HostProcess,
    assert_holds,
    begun,
    fill,
    kvd,
    kvd_process,
    names,
    prompt_of,
)
from tests.waiting import PATIENCE_S, wait_until

TOKENS = 40
PROMPT = prompt_of(TOKENS)


def stops(host: HostProcess) -> None:
    """Sends SIGTERM, and waits until the kvd says that it is not ready any more."""
    host.process.terminate()
    wait_until(lambda: host.get("/ready")[0] == 503)


def test_a_kvd_is_live_and_ready_without_an_engine(tmp_path: Path) -> None:
    with kvd(tmp_path) as host:
        status, body = host.get("/ready")
        assert status == 200 and json.loads(body) == {"ready": True, "reason": ""}
        assert host.get("/live")[0] == 200


def test_a_kvd_that_stops_grants_nothing_and_receives_what_it_has_granted(tmp_path: Path) -> None:
    with (
        kvd(tmp_path, name="p") as here,
        here.engine() as prefill,
        kvd_process(tmp_path, name="d") as there,
        there.engine() as decode,
    ):
        grant = there.grant(PROMPT)
        lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=grant))
        stops(there)
        assert "stopping" in json.loads(there.get("/ready")[1])["reason"]
        assert there.get("/live")[0] == 200
        refused = there.open(prompt_of(TOKENS, seed=1))
        assert isinstance(refused, NotNow) and "stopping" in refused.reason
        fill(lease, PROMPT)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        with decode.attach(grant.transfer_id) as attached:
            assert_holds(attached, PROMPT, TOKENS)
            assert there.process.poll() is None
        assert there.process.wait(PATIENCE_S) == 0


def test_a_kvd_that_stops_sends_what_its_engine_has_left(tmp_path: Path) -> None:
    """The engine has handed over its state and has exited, as the node of an own kvd does."""
    with (
        kvd(tmp_path, name="d") as there,
        there.engine() as decode,
        closing(
            Relay(Address("127.0.0.1", 0), parse_address(there.data, "data"), Conditions())
        ) as relay,
        kvd_process(tmp_path, name="p") as here,
    ):
        relay.start().stall()
        grant = there.grant(PROMPT)
        by_relay = msgspec.structs.replace(grant, data_address=str(relay.address))
        with here.engine() as prefill:
            lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=by_relay))
            fill(lease, PROMPT)
            lease.commit()
        wait_until(lambda: here.stats()["engines"] == [])
        assert here.stats()["outgoing"]["sending"] == 1
        stops(here)
        relay.restore()
        assert there.settled(grant)["state"] == "committed"
        with decode.attach(grant.transfer_id) as attached:
            assert_holds(attached, PROMPT, TOKENS)
        assert here.process.wait(PATIENCE_S) == 0


def test_a_kvd_waits_for_its_transfers_no_longer_than_drain_s(tmp_path: Path) -> None:
    with kvd_process(tmp_path, "--set", "kvd.timeouts.drain_s=0.1") as host, host.engine():
        host.grant(PROMPT)  # no sender will use it
        assert host.end() == 0
    assert "1 incoming" in (tmp_path / "kvd.log").read_text()


def test_a_kvd_may_open_as_many_descriptors_as_the_system_allows(tmp_path: Path) -> None:
    with low_limit() as hard, kvd_process(tmp_path) as host:
        assert soft_limit(host.process.pid) == hard


async def test_a_client_that_leaves_ends_its_wait(tmp_path: Path) -> None:
    """The wait would last a minute. Clients that come back again and again would collect them."""
    options = KvdOptions(socket=tmp_path / "s", store=StoreOptions(memory_bytes=MEMORY_BYTES))
    async with run_kvd(options) as running:
        address = parse_address(running.http_url.removeprefix("http://"), "url")
        idle = len(asyncio.all_tasks())
        clients = [await asyncio.open_connection(*address) for _ in range(20)]
        for _, writer in clients:
            writer.write(b"GET /v1/events?since=0&wait_s=60 HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await until(lambda: len(asyncio.all_tasks()) >= idle + 20)
        for _, writer in clients:
            writer.transport.abort()
        await until(lambda: len(asyncio.all_tasks()) <= idle)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S / 2):
        while True:
            if condition():
                return
            await asyncio.sleep(0.002)
