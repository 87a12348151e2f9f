"""What goes wrong between a grant and the last token: never a wrong token, never a dead node, and
every page comes back on both sides. The emulated engine checks each byte it resumes from."""

from __future__ import annotations

import http.client
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.node.conftest import start_emulated
from tests.node.hosts import Gateway, Granted, Host, text_of, tokens_of
from tests.waiting import wait_until

LONG = 50_000  # tokens: a prefill of most of a second
NEW_TOKENS = 4


_SEEDS = count()


def fresh(tokens: int) -> list[int]:
    """A prompt that nobody has seen."""
    return random.Random(next(_SEEDS)).choices(range(256), k=tokens)


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Its decode side waits for nobody."""
    folder = tmp_path_factory.mktemp("hasty")
    yield from start_emulated(folder, "--grant-s", "4", "--dispatch-s", "0.5")


def check_healthy(pair: Gateway) -> None:
    """Nothing is left of what went before, and a hand-off works."""
    for host in (pair.prefill_host, pair.decode_host):
        host.wait_until_idle()
    ids = fresh(300)
    expected = tokens_of(pair.decode_host.complete(ids, max_tokens=NEW_TOKENS, cache_salt="alone"))
    assert pair.hand_off(ids, max_tokens=NEW_TOKENS).tokens == expected


def check_lost(pair: Gateway, granted: Granted) -> None:
    """A clear error, by which a gateway re-issues; the prompt is not computed in silence."""
    status, answer = pair.decode(granted, NEW_TOKENS)
    assert (status, answer["error"]["code"]) == (424, "transfer_lost"), answer


def wait_for_bytes(host: Host, before: int) -> None:
    wait_until(lambda: host.received_bytes() > before)


def test_an_engine_killed_in_mid_transfer(emulated: Gateway) -> None:
    before = emulated.decode_host.received_bytes()
    granted = emulated.open(fresh(LONG))
    with ThreadPoolExecutor() as threads:
        prefilling = threads.submit(emulated.prefill, granted)
        wait_for_bytes(emulated.decode_host, before)
        emulated.prefill_host.node.kill()
        assert prefilling.exception() is not None
    assert emulated.state(granted) == "failed"
    check_lost(emulated, granted)
    emulated.prefill_host.begin_node()
    emulated.prefill_host.wait_until_ready()
    check_healthy(emulated)


@pytest.mark.slow
def test_a_sending_kvd_killed_in_mid_transfer(hasty: Gateway) -> None:
    before = hasty.decode_host.received_bytes()
    granted = hasty.open(fresh(LONG))
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


def test_a_receiving_kvd_restarted_between_prefill_and_decode(emulated: Gateway) -> None:
    granted = emulated.open(fresh(300))
    assert emulated.prefill(granted)[0] == 200
    assert emulated.state(granted) == "committed"
    emulated.decode_host.kvd.kill()
    emulated.decode_host.start_kvd()
    check_lost(emulated, granted)
    check_healthy(emulated)


def test_a_gateway_that_changes_its_mind_between_prefill_and_decode(emulated: Gateway) -> None:
    granted = emulated.open(fresh(300))
    assert emulated.prefill(granted)[0] == 200
    assert emulated.state(granted) == "committed"
    emulated.abort(granted)
    check_lost(emulated, granted)
    check_healthy(emulated)


@pytest.mark.slow
def test_a_gateway_that_is_gone_after_the_commit(hasty: Gateway) -> None:
    granted = hasty.open(fresh(300))
    assert hasty.prefill(granted)[0] == 200
    hasty.decode_host.wait_until_idle()  # asking for its state would be a gateway's poll
    check_lost(hasty, granted)


@pytest.mark.slow
def test_a_grant_whose_deadline_has_passed(hasty: Gateway) -> None:
    granted = hasty.open(fresh(LONG))
    assert hasty.state(granted) == "failed"
    status, answer = hasty.prefill(granted)  # told by the receiver, long before its end
    assert (status, answer["error"]["code"]) == (424, "transfer_lost"), answer
    check_lost(hasty, granted)


def test_a_client_that_hangs_up_in_mid_prefill(emulated: Gateway) -> None:
    granted = emulated.open(fresh(LONG))
    body = {
        "prompt": granted.prompt[: granted.handoff_tokens],
        "kv_transfer_params": {"do_remote_decode": True, "grant": granted.grant},
    }
    hang_up_after(emulated.prefill_host, body, emulated.decode_host)
    assert emulated.state(granted) == "failed"
    check_lost(emulated, granted)
    check_healthy(emulated)


def hang_up_after(host: Host, body: dict[str, Any], receiver: Host) -> None:
    before = receiver.received_bytes()
    connection = http.client.HTTPConnection(urlsplit(host.url).netloc)
    connection.request("POST", "/v1/completions", json.dumps(body))
    wait_for_bytes(receiver, before)
    connection.close()


def test_a_transfer_is_attached_once(emulated: Gateway) -> None:
    granted = emulated.open(fresh(300))
    assert emulated.prefill(granted)[0] == 200
    assert emulated.state(granted) == "committed"
    assert emulated.decode(granted, NEW_TOKENS)[0] == 200
    check_lost(emulated, granted)


def test_requests_that_name_nothing(emulated: Gateway) -> None:
    unknown = Granted("no-such-transfer", {}, fresh(100), 64, "")
    check_lost(emulated, unknown)
    granted = emulated.open(fresh(300))
    forged = {**granted.grant, "token": "0" * len(granted.grant["token"])}
    answer = emulated.prefill(Granted(granted.transfer_id, forged, granted.prompt, 299, ""))
    assert emulated.state(granted, wait_s=0.2) != "committed", answer
    emulated.abort(granted)
    check_healthy(emulated)


def test_a_prompt_shorter_than_what_was_handed_off(emulated: Gateway) -> None:
    granted = emulated.open(fresh(300))
    assert emulated.prefill(granted)[0] == 200
    assert emulated.state(granted) == "committed"
    short = Granted(granted.transfer_id, {}, granted.prompt[:200], 0, "")
    status, answer = emulated.decode(short, NEW_TOKENS)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    check_healthy(emulated)


def test_another_prompt_than_was_handed_off_never_gets_tokens(emulated: Gateway) -> None:
    granted = emulated.open(fresh(300))
    assert emulated.prefill(granted)[0] == 200
    assert emulated.state(granted) == "committed"
    other = Granted(granted.transfer_id, {}, fresh(300), 0, "")
    status, answer = emulated.decode(other, NEW_TOKENS)
    assert (status, answer["error"]["param"]) == (400, "prompt")
    check_healthy(emulated)


def test_a_term_signal_drains(emulated: Gateway) -> None:
    host = emulated.decode_host
    with ThreadPoolExecutor() as threads:
        asking = threads.submit(host.ask, fresh(200), max_tokens=40)
        wait_until(lambda: "running 1" in running(host))
        host.node.popen.terminate()
        status, answer = asking.result()
    assert status == 200 and answer["usage"]["completion_tokens"] == 40
    assert host.node.stop() == 0
    host.wait_until_idle()
    host.begin_node()
    host.wait_until_ready()
    check_healthy(emulated)


def running(host: Host) -> str:
    page = text_of(f"{host.url}/metrics")
    line = next(x for x in page.splitlines() if x.startswith("vllm:num_requests_running{"))
    return f"running {float(line.split()[-1]):g}"
