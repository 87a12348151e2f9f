"""Prefixes pulled from another kvd's pool: what is sent, by which route, priority and timeout."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from prfaas.config.address import Address, parse_address
from prfaas.contracts.kvd_api import PULL_S, PullPrefix
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.transport.link import LinkOptions
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.kvd.hosts import SPEC, Host, assert_holds, begun, fill, kvd, names, prompt_of
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """The kvd that has prefixes, and the kvd that pulls them."""
    with kvd(tmp_path, name="s") as here, kvd(tmp_path, name="t") as there:
        yield here, there


@pytest.fixture
def relay(pair: tuple[Host, Host]) -> Iterator[Relay]:
    """In front of the kvd that pulls."""
    data = parse_address(pair[1].data, "data")
    with closing(Relay(Address("127.0.0.1", 0), data, Conditions()).start()) as started:
        yield started


def keep(engine: KvdClient, prompt: list[int]) -> None:
    """Computed and kept as prefix."""
    lease = begun(engine.begin(names(prompt), len(prompt)))
    fill(lease, prompt)
    lease.commit()


def test_only_missing_blocks_and_the_states_at_the_end_are_sent(pair: tuple[Host, Host]) -> None:
    here, there = pair
    prompt = prompt_of(40)
    with here.engine() as source, there.engine() as target:
        keep(target, prompt[:16])
        keep(source, prompt)
        status, body = there.post("/v1/pull", PullPrefix(here.url, tuple(names(prompt))))
        assert status == 200, body
        found = json.loads(body)
        missing = SPEC.kv_bytes(40, 16)  # attention after 16 tokens; every window, every state
        assert found["tokens"] == 40 and found["granted_bytes"] >= missing
        assert there.received_bytes() == missing
        with begun(target.pin(names(prompt))) as state:
            assert state.tokens == 40
            assert_holds(state, prompt, 40)
        wait_until(lambda: here.in_use() == there.in_use() == (0, 0))


def test_a_prefix_that_is_here_is_not_sent_again(pair: tuple[Host, Host]) -> None:
    here, there = pair
    prompt = prompt_of(40)
    with here.engine() as source, there.engine():
        keep(source, prompt)
        asked = PullPrefix(here.url, tuple(names(prompt)))
        assert there.post("/v1/pull", asked)[0] == 200
        before = there.received_bytes()
        again = json.loads(there.post("/v1/pull", asked)[1])
        assert (again["tokens"], again["granted_bytes"]) == (40, 0)
        assert there.received_bytes() == before


def test_a_pull_from_an_unreachable_kvd_reserves_nothing(pair: tuple[Host, Host]) -> None:
    _, there = pair
    with there.engine():
        unreachable = PullPrefix("http://127.0.0.1:1", tuple(names(prompt_of(8))))
        status, body = there.post("/v1/pull", unreachable)
        assert status == 502 and b"127.0.0.1:1" in body
        assert there.in_use() == (0, 0)


SECRET = b"the answer of an internal server"


class _Internal(BaseHTTPRequestHandler):
    """A server that the kvd can reach and the caller of the kvd cannot."""

    status = 200

    def do_POST(self) -> None:
        self.send_response(self.status)
        self.end_headers()
        self.wfile.write(SECRET)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.mark.parametrize("status", [200, 404])
def test_a_pull_does_not_show_what_its_source_responded(
    pair: tuple[Host, Host], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Internal, "status", status)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Internal) as server, pair[1].engine():
        serving = Thread(target=server.serve_forever)
        serving.start()
        url = f"http://127.0.0.1:{server.server_port}"
        answers = [
            pair[1].post("/v1/pull", PullPrefix(source, tuple(names(prompt_of(8)))))
            for source in (url, f"{url}/admin?x=#", f"{url}/admin", f"http://user:key@{url[7:]}")
        ]
        server.shutdown()
        serving.join()
    assert not any(SECRET in body or b"key" in body for _, body in answers)
    assert answers[0][0] == 502 and [code for code, _ in answers[1:]] == [400] * 3


def test_a_pull_uses_the_relay_that_it_names(pair: tuple[Host, Host], relay: Relay) -> None:
    here, there = pair
    prompt = prompt_of(40)
    with here.engine() as source, there.engine():
        keep(source, prompt)
        asked = PullPrefix(here.url, tuple(names(prompt)), via=str(relay.address))
        status, body = there.post("/v1/pull", asked)
        assert status == 200, body
        assert there.received_bytes() == SPEC.kv_bytes(40)
        # The relay counts a chunk once it has sent it, which may be after it has arrived.
        wait_until(lambda: relay.stats.to_target_bytes > SPEC.kv_bytes(40))


def test_a_pull_times_out(pair: tuple[Host, Host], relay: Relay) -> None:
    here, there = pair
    prompt = prompt_of(40)
    relay.outage()
    with here.engine() as source, there.engine() as target:
        keep(source, prompt)
        asked = PullPrefix(here.url, tuple(names(prompt)), via=str(relay.address), within_s=0.2)
        status, body = there.post("/v1/pull", asked)
        assert status == 502 and b"within 0.2 s" in body
        wait_until(lambda: there.in_use() == (0, 0))
        relay.restore()
        wait_until(lambda: here.in_use() == (0, 0))
        assert begun(target.pin(names(prompt))).tokens == 0, "nothing half made is used"


def test_a_pull_has_a_bounded_timeout(pair: tuple[Host, Host]) -> None:
    for within_s in (0.0, -1.0, PULL_S + 1):
        status, _ = pair[1].post("/v1/pull", PullPrefix("http://x", (b"x",), within_s=within_s))
        assert status == 400


def test_a_later_hand_off_is_sent_before_a_pull(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With one small frame in flight at a time, a hand-off does not wait for the pull before it."""
    small = {"frame_bytes": 4096, "quantum_bytes": 4096, "in_flight_bytes": 1}
    monkeypatch.setattr("prfaas.kvd.process.LinkOptions", partial(LinkOptions, **small))
    caplog.set_level("INFO", "prfaas.kvd.transfers.incoming")
    pulled, urgent = prompt_of(1600), prompt_of(40, seed=1)
    with ExitStack() as stack:
        here = stack.enter_context(kvd(tmp_path, name="s", connections=1))
        there = stack.enter_context(kvd(tmp_path, name="t"))
        data = parse_address(there.data, "data")
        relay = Relay(Address("127.0.0.1", 0), data, Conditions()).start()
        stack.enter_context(closing(relay)).outage()
        source, _ = stack.enter_context(here.engine()), stack.enter_context(there.engine())
        thread = stack.enter_context(ThreadPoolExecutor(1))
        keep(source, pulled)
        asked = PullPrefix(here.url, tuple(names(pulled)), via=str(relay.address))
        pulling = thread.submit(there.post, "/v1/pull", asked)
        wait_until(lambda: here.stats()["outgoing"]["sending"] == 1)
        granted = there.grant(urgent)
        grant = msgspec.structs.replace(granted, data_address=str(relay.address))
        lease = begun(source.begin(names(urgent), 40, grant=grant))
        fill(lease, urgent)
        lease.commit()
        assert here.stats()["outgoing"]["sending"] == 2
        relay.restore()
        assert pulling.result(PATIENCE_S)[0] == 200
    committed = re.findall(r"transfer (\S+) committed", caplog.text)
    assert len(committed) == 2 and committed[0] == granted.transfer_id
