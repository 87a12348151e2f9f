"""What goes wrong between a grant and the last token: never a wrong token, never a dead node, and
every page comes back on both sides. The emulated engine checks each byte it resumes from; with a
real model the tokens tell."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from prfaas.config.address import parse_address
from prfaas.scheduler.handoff import Handoff
from tests.node.conftest import EMULATED, hf_options, start_hosts
from tests.node.hosts import START_S, Gateway, Granted, Host, cached_of, text_of, tokens_of
from tests.transport.proxy import Meddle, Proxy
from tests.waiting import PATIENCE_S, wait_until

# So that a fault test does not wait for the timeouts of production.
SHORT_TIMEOUTS = ("--set", "kvd.timeouts.grant_s=4", "--set", "kvd.timeouts.dispatch_s=0.5")
STALL_S = 6.0
SHORT_STALL = ("--set", f"kvd.timeouts.transfer_stall_s={STALL_S:g}")
pytestmark = pytest.mark.timeout(2 * START_S)  # hosts start within it

BLOCK = 64
NEW_TOKENS = 4
MANY_TOKENS = 2_000  # an answer that is not over before something happens to it
_SEEDS = count()


@dataclass(frozen=True, slots=True)
class Kind:
    """Of engine: how it is started, a prompt that many chunks bring, and one whose prefill is not
    over before something happens to it, however slowly a crowded machine looks."""

    options: tuple[str, ...]
    long_tokens: int
    endless_tokens: int
    small_memory: str  # holds a few short prompts


@pytest.fixture(scope="module", params=["emulated", pytest.param("hf", marks=pytest.mark.grid)])
def kind(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> Kind:
    if request.param == "emulated":
        return Kind(EMULATED, 50_000, 120_000, "128KiB")
    return Kind(hf_options(checkpoint("kimi-linear")), 4_000, 24_000, "1MiB")


@pytest.fixture(scope="module")
def patient_hosts(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    yield from start_hosts(tmp_path_factory.mktemp("pair"), kind.options)


@pytest.fixture(scope="module")
def hasty_hosts(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("hasty")
    yield from start_hosts(folder, kind.options, *SHORT_TIMEOUTS, prefill_kvd=SHORT_STALL)


@pytest.fixture
def pair(patient_hosts: Gateway) -> Gateway:
    """Whatever a test does to them, it leaves them healthy: that is half of what is tested."""
    return revived(patient_hosts)


@pytest.fixture
def hasty(hasty_hosts: Gateway) -> Gateway:
    """A pair whose decode side does not wait for requests, nor its prefill side for outages."""
    return revived(hasty_hosts)


def revived(gateway: Gateway) -> Gateway:
    """A test that has failed half-way does not fail the next ones."""
    for host in (gateway.prefill_host, gateway.decode_host):
        host.revive()
    return gateway


def fresh(tokens: int) -> list[int]:
    """A prompt that no node has seen."""
    return random.Random(next(_SEEDS)).choices(range(256), k=tokens)


def alone(host: Host, ids: list[int]) -> list[int]:
    """One process, nothing cached."""
    salt = f"alone {next(_SEEDS)}"
    return tokens_of(host.complete(ids, max_tokens=NEW_TOKENS, cache_salt=salt, ignore_eos=True))


def check_healthy(pair: Gateway) -> None:
    """Nothing is left of what went before, and a hand-off works."""
    for host in (pair.prefill_host, pair.decode_host):
        host.wait_until_idle()
    ids = fresh(300)
    handed = pair.hand_off(ids, max_tokens=NEW_TOKENS)
    assert handed.tokens == alone(pair.decode_host, ids)[: len(handed.tokens)]


def check_lost(pair: Gateway, granted: Granted) -> None:
    """A clear error, by which a gateway re-issues; the prompt is not computed in silence."""
    status, answer = pair.decode(granted, NEW_TOKENS)
    assert (status, answer["error"]["code"]) == (424, "transfer_lost"), answer


def wait_for_bytes(host: Host, before: int) -> None:
    wait_until(lambda: host.received_bytes() > before)


def test_an_engine_killed_in_mid_transfer(pair: Gateway, kind: Kind) -> None:
    before = pair.decode_host.received_bytes()
    granted = pair.open(fresh(kind.endless_tokens))
    with ThreadPoolExecutor() as threads:
        prefilling = threads.submit(pair.prefill, granted)
        wait_for_bytes(pair.decode_host, before)
        pair.prefill_host.node.kill()
        assert prefilling.exception() is not None
    assert pair.state(granted) == "failed"
    check_lost(pair, granted)
    pair.prefill_host.begin_node()
    pair.prefill_host.wait_until_ready()
    check_healthy(pair)


@pytest.mark.slow
def test_a_sending_kvd_killed_in_mid_transfer(hasty: Gateway, kind: Kind) -> None:
    before = hasty.decode_host.received_bytes()
    granted = hasty.open(fresh(kind.endless_tokens))
    with ThreadPoolExecutor() as threads:
        prefilling = threads.submit(hasty.prefill, granted)
        wait_for_bytes(hasty.decode_host, before)
        hasty.prefill_host.kvd.kill()
        status, answer = prefilling.result()
        assert (status, answer["error"]["code"]) == (424, "transfer_lost"), answer
    assert hasty.state(granted) == "failed"
    check_lost(hasty, granted)
    # Without its kvd the node still answers plain requests, and it comes back to a new one.
    hasty.prefill_host.complete(fresh(300), max_tokens=NEW_TOKENS)
    hasty.prefill_host.start_kvd()
    hasty.prefill_host.complete(fresh(300), max_tokens=NEW_TOKENS)
    check_healthy(hasty)


def test_a_receiving_kvd_restarted_between_prefill_and_decode(pair: Gateway) -> None:
    granted = pair.open(fresh(300))
    assert pair.prefill(granted)[0] == 200
    assert pair.state(granted) == "committed"
    pair.decode_host.kvd.kill()
    pair.decode_host.start_kvd()
    check_lost(pair, granted)
    check_healthy(pair)


def test_a_gateway_that_changes_its_mind_between_prefill_and_decode(pair: Gateway) -> None:
    granted = pair.open(fresh(300))
    assert pair.prefill(granted)[0] == 200
    assert pair.state(granted) == "committed"
    pair.abort(granted)
    check_lost(pair, granted)
    check_healthy(pair)


@pytest.mark.slow
def test_a_gateway_that_is_gone_after_the_commit(hasty: Gateway) -> None:
    granted = hasty.open(fresh(300))
    assert hasty.prefill(granted)[0] == 200
    hasty.decode_host.wait_until_idle()  # asking for its state would be a gateway's poll
    check_lost(hasty, granted)


@pytest.mark.slow
def test_a_grant_whose_deadline_has_passed(hasty: Gateway, kind: Kind) -> None:
    granted = hasty.open(fresh(kind.endless_tokens))
    hasty.decode_host.wait_until_idle()  # also when its gateway never asks again
    assert hasty.state(granted) == "failed"
    status, answer = hasty.prefill(granted)  # the receiver reports it, long before the prefill ends
    assert (status, answer["error"]["code"]) == (424, "transfer_lost"), answer
    check_lost(hasty, granted)


@pytest.mark.slow
def test_a_receiving_kvd_restarted_in_mid_transfer(hasty: Gateway, kind: Kind) -> None:
    before = hasty.decode_host.received_bytes()
    granted = hasty.open(fresh(kind.long_tokens))
    with ThreadPoolExecutor() as threads:
        prefilling = threads.submit(hasty.prefill, granted)
        wait_for_bytes(hasty.decode_host, before)
        hasty.decode_host.kvd.kill()
        hasty.decode_host.start_kvd()
        check_lost(hasty, granted)
        status, answer = prefilling.result()  # of use to its own pool, at least
        assert status == 200 or answer["error"]["code"] == "transfer_lost", answer
    # A receiver that does not know a transfer hangs up, and a sender believes in outages first.
    hasty.prefill_host.wait_until_idle(within_s=PATIENCE_S + STALL_S)
    check_healthy(hasty)


def test_an_engine_restarted_between_prefill_and_decode(pair: Gateway) -> None:
    """The bytes are the kvd's: the next process continues them."""
    granted = pair.open(fresh(300))
    assert pair.prefill(granted)[0] == 200
    assert pair.state(granted) == "committed"
    pair.decode_host.node.kill()
    pair.decode_host.begin_node()
    pair.decode_host.wait_until_ready()
    assert pair.state(granted) == "committed"
    status, answer = pair.decode(granted, NEW_TOKENS)
    assert status == 200 and cached_of(answer) == granted.handoff_tokens
    expected = alone(pair.prefill_host, granted.prompt)
    assert tokens_of(answer) == expected[: len(tokens_of(answer))]
    check_healthy(pair)


def test_an_engine_killed_in_mid_decode(pair: Gateway) -> None:
    with decoding(pair) as granted:
        pair.decode_host.node.kill()
    pair.decode_host.wait_until_idle()
    pair.decode_host.begin_node()
    pair.decode_host.wait_until_ready()
    check_lost(pair, granted)  # another request has claimed it
    check_healthy(pair)


def test_a_client_that_hangs_up_in_mid_decode(pair: Gateway) -> None:
    with decoding(pair) as granted:
        pass
    wait_until(lambda: "running 0" in running(pair.decode_host))
    check_lost(pair, granted)
    check_healthy(pair)


@contextmanager
def decoding(pair: Gateway) -> Iterator[Granted]:
    """A handed-off request that is being answered; its client hangs up in the end."""
    granted = pair.open(fresh(300))
    assert pair.prefill(granted)[0] == 200
    assert pair.state(granted) == "committed"
    params = {"do_remote_prefill": True, "transfer_id": granted.transfer_id}
    body = {
        "prompt": granted.prompt,
        "max_tokens": MANY_TOKENS,
        "ignore_eos": True,
        "kv_transfer_params": params,
    }
    with closing(http.client.HTTPConnection(urlsplit(pair.decode_host.url).netloc)) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body))
        wait_until(lambda: "running 1" in running(pair.decode_host))
        yield granted


def test_a_client_that_hangs_up_in_mid_prefill(pair: Gateway, kind: Kind) -> None:
    granted = pair.open(fresh(kind.endless_tokens))
    body = {
        "prompt": granted.prompt[: granted.handoff_tokens],
        "kv_transfer_params": {"do_remote_decode": True, "grant": granted.grant},
    }
    hang_up_after(pair.prefill_host, body, pair.decode_host)
    assert pair.state(granted) == "failed"
    check_lost(pair, granted)
    check_healthy(pair)


def hang_up_after(host: Host, body: dict[str, Any], receiver: Host) -> None:
    before = receiver.received_bytes()
    connection = http.client.HTTPConnection(urlsplit(host.url).netloc)
    connection.request("POST", "/v1/completions", json.dumps(body))
    wait_for_bytes(receiver, before)
    connection.close()


def test_a_transfer_is_attached_once(pair: Gateway) -> None:
    granted = pair.open(fresh(300))
    assert pair.prefill(granted)[0] == 200
    assert pair.state(granted) == "committed"
    assert pair.decode(granted, NEW_TOKENS)[0] == 200
    check_lost(pair, granted)


def test_requests_that_name_nothing(pair: Gateway) -> None:
    unknown = Granted("no-such-transfer", {}, fresh(100), 64, "")
    check_lost(pair, unknown)
    granted = pair.open(fresh(300))
    forged = {**granted.grant, "token": "0" * len(granted.grant["token"])}
    answer = pair.prefill(Granted(granted.transfer_id, forged, granted.prompt, 299, ""))
    assert pair.state(granted, wait_s=0.2) != "committed", answer
    pair.abort(granted)
    check_healthy(pair)


def test_a_prompt_shorter_than_what_was_handed_off(pair: Gateway) -> None:
    granted = pair.open(fresh(300))
    assert pair.prefill(granted)[0] == 200
    assert pair.state(granted) == "committed"
    short = Granted(granted.transfer_id, {}, granted.prompt[:200], 0, "")
    status, answer = pair.decode(short, NEW_TOKENS)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    check_healthy(pair)


def test_another_prompt_than_was_handed_off_never_gets_tokens(pair: Gateway) -> None:
    granted = pair.open(fresh(300))
    assert pair.prefill(granted)[0] == 200
    assert pair.state(granted) == "committed"
    other = Granted(granted.transfer_id, {}, fresh(300), 0, "")
    status, answer = pair.decode(other, NEW_TOKENS)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    check_healthy(pair)


@pytest.mark.parametrize("tokens", [300, 40])
def test_a_prompt_with_another_end_never_gets_tokens(pair: Gateway, tokens: int) -> None:
    """Equal in every whole block, or too short to have one; the state is of other tokens."""
    granted = pair.open(fresh(tokens), length=Handoff(tokens - 1, None))
    assert granted.handoff_tokens % BLOCK
    assert pair.prefill(granted)[0] == 200
    assert pair.state(granted) == "committed"
    other = list(granted.prompt)
    other[granted.handoff_tokens - 1] ^= 1
    status, answer = pair.decode(replace(granted, prompt=other), NEW_TOKENS)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    check_healthy(pair)


def test_an_answer_under_way_holds_no_pages(pair: Gateway) -> None:
    with decoding(pair):
        pair.decode_host.wait_until_idle()
        assert "running 1" in running(pair.decode_host)
    check_healthy(pair)


def test_a_term_signal_drains(pair: Gateway) -> None:
    host = pair.decode_host
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(host.ask, fresh(200), max_tokens=40, ignore_eos=True)
        wait_until(lambda: "running 1" in running(host))
        host.node.popen.terminate()
        status, answer = asking.result()
    assert status == 200 and answer["usage"]["completion_tokens"] == 40
    assert host.node.wait() == 0  # it has been told to stop
    host.wait_until_idle()
    host.begin_node()
    host.wait_until_ready()
    check_healthy(pair)


def running(host: Host) -> str:
    page = text_of(f"{host.url}/metrics")
    line = next(x for x in page.splitlines() if x.startswith("vllm:num_requests_running{"))
    return f"running {float(line.split()[-1]):g}"


# The wire --------------------------------------------------------------------------------------


@contextmanager
def through(granted: Granted, meddle: Meddle) -> Iterator[Granted]:
    """The same grant, by way of a wire that does this to the bytes."""
    address = parse_address(granted.grant["data_address"], "data_address")
    with Proxy(tuple(address), forward=meddle) as proxy:
        relayed = f"127.0.0.1:{proxy.address[1]}"
        yield replace(granted, grant={**granted.grant, "data_address": relayed})


def flipped(data: bytes) -> bytes:
    """One bit in the middle: of a payload, for headers are short."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


def test_damaged_bytes_are_sent_again(pair: Gateway, kind: Kind) -> None:
    damaged: list[int] = []

    def damage(connection: int, before: int, data: bytes) -> bytes:
        if len(damaged) < 5 and len(data) > 4_000 and before > 10_000:
            damaged.append(connection)
            return flipped(data)
        return data

    granted = pair.open(fresh(kind.long_tokens))
    with through(granted, damage) as relayed:
        status, answer = pair.prefill(relayed)
        assert status == 200, answer
        assert pair.state(granted) == "committed"
    assert damaged
    status, answer = pair.decode(granted, NEW_TOKENS)
    assert status == 200, answer
    expected = alone(pair.prefill_host, granted.prompt)
    assert tokens_of(answer) == expected[: len(tokens_of(answer))]
    check_healthy(pair)


@pytest.mark.slow
def test_a_wire_that_damages_everything_brings_nothing(pair: Gateway) -> None:
    damaged: list[int] = []

    def damage(connection: int, before: int, data: bytes) -> bytes:
        if len(data) > 4_000:
            damaged.append(connection)
            return flipped(data)
        return data

    granted = pair.open(fresh(1_000))
    with through(granted, damage) as relayed, ThreadPoolExecutor() as threads:
        prefilling = threads.submit(pair.prefill, relayed)
        wait_until(lambda: len(damaged) > 5)
        assert pair.state(granted, wait_s=0.0) != "committed"
        pair.abort(granted)
        prefilling.result()
    assert pair.state(granted) == "failed"
    check_lost(pair, granted)
    check_healthy(pair)


# Pressure --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_eviction_pressure_while_a_grant_pins_a_prefix(kind: Kind, tmp_path: Path) -> None:
    """Others push everything else out of the decode side's memory; what the grant counts on stays,
    and is continued from."""
    options = (
        (*kind.options, "--set", "node.emulated.byte_scale=1e-3")
        if "emulated" in kind.options
        else kind.options
    )
    for pair in start_hosts(tmp_path, options, "--memory", "1MiB"):
        first = fresh(4 * BLOCK + 10)
        pair.hand_off(first, max_tokens=NEW_TOKENS)
        longer = [*first[: 4 * BLOCK], *fresh(100)]
        granted = pair.open(longer)
        assert min(granted.grant["skip_tokens"].values()) == 4 * BLOCK
        for _ in range(16):
            pair.decode_host.complete(fresh(4 * BLOCK + 10), max_tokens=1)
        counters = pair.decode_host.stats()["pool"]["counters"]
        assert counters["evicted_blocks"] > 16
        assert pair.prefill(granted)[0] == 200
        assert pair.state(granted) == "committed"
        status, answer = pair.decode(granted, NEW_TOKENS)
        assert status == 200 and cached_of(answer) == granted.handoff_tokens, answer
        expected = alone(pair.prefill_host, longer)
        assert tokens_of(answer) == expected[: len(tokens_of(answer))]
        check_healthy(pair)
