"""Answers that an engine keeps in its kvd, and what happens when one of the two dies meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.errors import ConnectionLost, InputError, TransferFailed
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.store import StoreOptions
from prfaas.types import NotNow
from tests.cache.builders import BLOCK
from tests.kvd.hosts import Host, assert_holds, begun, fill, kvd, kvd_process, names, prompt_of
from tests.waiting import PATIENCE_S, wait_until

TOKENS, HELD = 15 * BLOCK, 10 * BLOCK
CONVERSATION = prompt_of(TOKENS)
BLOCK_ANSWER_PAGES = 15  # an answer of one block, with its window and state


def serve_prompt(engine: KvdClient, tokens: int = HELD, seed: int = 0) -> None:
    prompt = prompt_of(tokens, seed)
    lease = begun(engine.begin(names(prompt), tokens))
    fill(lease, prompt)
    lease.commit()


def kept(host: Host) -> int:
    counted = host.stats()["pool"]["counters"]["kept_answers"]
    assert isinstance(counted, int)
    return counted


def free_pages(host: Host) -> int:
    occupancy = host.stats()["pool"]["occupancy"]
    free = occupancy["capacity_pages"] - occupancy["used_pages"]
    assert isinstance(free, int)
    return free


def test_an_answer_becomes_an_ordinary_prefix(tmp_path: Path) -> None:
    with kvd(tmp_path) as host, host.engine(keeps_answers=True) as engine:
        serve_prompt(engine)
        seq = host.stats()["next_seq"]
        lease = begun(engine.begin_answer(names(CONVERSATION), TOKENS, first_token=HELD))
        assert set(lease.skip_tokens.values()) == {HELD}
        fill(lease, CONVERSATION)
        lease.commit()
        assert kept(host) == 1 and host.in_use() == (0, 0)
        assert host.stats()["next_seq"] != seq, "it was not announced"
        found = begun(engine.pin(names(CONVERSATION)))
        assert found.tokens == TOKENS
        assert_holds(found, CONVERSATION, TOKENS)
        found.release()
        # The next prompt of the conversation gets it in its grant.
        grant = host.grant(CONVERSATION + prompt_of(6, seed=1))
        assert set(grant.skip_tokens.values()) == {TOKENS}


def test_an_answer_without_its_state_is_not_kept(tmp_path: Path) -> None:
    with kvd(tmp_path) as host, host.engine(keeps_answers=True) as engine:
        serve_prompt(engine)
        lease = begun(engine.begin_answer(names(CONVERSATION), TOKENS, first_token=HELD))
        fill(lease, CONVERSATION, stop=TOKENS - 4)
        with pytest.raises(InputError, match="not ready"):
            lease.commit()
        assert kept(host) == 0 and host.in_use() == (0, 0)
        left = begun(engine.begin_answer(names(CONVERSATION), TOKENS, first_token=HELD))
        left.abort("the client has left")
        assert kept(host) == 0 and host.in_use() == (0, 0)


def test_an_engine_that_keeps_none_has_no_pages_for_it(tmp_path: Path) -> None:
    with kvd(tmp_path) as host, host.engine() as engine:
        serve_prompt(engine)
        refused = engine.begin_answer(names(CONVERSATION), TOKENS, first_token=HELD)
        assert isinstance(refused, NotNow) and "no room" in refused.reason
        with host.engine("keeper", keeps_answers=True) as keeper:
            begun(keeper.begin_answer(names(CONVERSATION), TOKENS, first_token=HELD)).abort("test")


def all_grants(host: Host) -> int:
    """Opens transfers until one is refused, aborts them all, and says how many there were."""
    granted = []
    while not isinstance(grant := host.open(prompt_of(BLOCK, seed=100 + len(granted))), NotNow):
        granted.append(grant)
    for one in granted:
        host.post(f"/v1/transfers/{one.transfer_id}/abort", {"reason": "test"})
    return len(granted)


def test_a_grant_is_given_while_answers_are_written(tmp_path: Path) -> None:
    """An engine that stops in the middle of an answer takes nothing from grants. They evict the
    prompt, so that the answer is not kept, and no page is lost."""
    store = StoreOptions(memory_bytes=48 << 10)
    with kvd(tmp_path, store=store) as host, host.engine(keeps_answers=True) as engine:
        possible = all_grants(host)
        wait_until(lambda: host.in_use() == (0, 0))
        serve_prompt(engine)
        lease = begun(engine.begin_answer(names(CONVERSATION), TOKENS, first_token=HELD))
        fill(lease, CONVERSATION)
        assert all_grants(host) == possible > 10
        with pytest.raises(TransferFailed, match="lost the prefix"):
            lease.commit()
        assert kept(host) == 0
        wait_until(lambda: host.in_use() == (0, 0))


def test_engine_killed_while_it_writes_an_answer(tmp_path: Path) -> None:
    with kvd(tmp_path) as host, host.engine(keeps_answers=True) as engine:
        serve_prompt(engine)
        command = [sys.executable, "-m", "tests.kvd.engine_process", str(host.socket)]
        command += [str(TOKENS), str(TOKENS - 4), f"answer_from={HELD}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "written\n"
            assert host.in_use()[1] == 1
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
        wait_until(lambda: host.in_use() == (0, 0))
        found = begun(engine.pin(names(CONVERSATION)))
        assert found.tokens == HELD  # the prompt is as it was
        assert_holds(found, CONVERSATION, HELD)
        lease = begun(engine.begin_answer(names(CONVERSATION), TOKENS, first_token=HELD))
        fill(lease, CONVERSATION)
        lease.commit()
        assert kept(host) == 1


def test_kvd_killed_while_an_answer_is_written(tmp_path: Path) -> None:
    with kvd_process(tmp_path) as host, host.engine(keeps_answers=True) as engine:
        serve_prompt(engine)
        lease = begun(engine.begin_answer(names(CONVERSATION), TOKENS, first_token=HELD))
        host.end(signal.SIGKILL)
        fill(lease, CONVERSATION)
        with pytest.raises(ConnectionLost):
            lease.commit()


def test_victims_of_an_answer_go_to_the_ssd(tmp_path: Path) -> None:
    """Every prompt and answer stays in one of the tiers, although memory has room for a part."""
    store = StoreOptions(memory_bytes=48 << 10, ssd=tmp_path, ssd_bytes=8 << 20)
    with kvd(tmp_path, store=store) as host, host.engine(keeps_answers=True) as engine:
        ends = [HELD]
        serve_prompt(engine)
        seed = 1
        while host.stats()["pool"]["occupancy"]["spilled_units"] == 0:
            serve_prompt(engine, 4 * BLOCK, seed)
            seed += 1
        while len(ends) < 4:
            # The SSD's thread has made the pages free that the next answer needs.
            wait_until(lambda: free_pages(host) >= BLOCK_ANSWER_PAGES)
            end = ends[-1] + BLOCK
            names_of = names(CONVERSATION[:end])
            lease = begun(engine.begin_answer(names_of, end, first_token=ends[-1]))
            fill(lease, CONVERSATION)
            lease.commit()
            ends.append(end)
        counters = host.stats()["pool"]["counters"]
        assert counters["kept_answers"] == 3 and counters["dropped_blocks"] == 0
        assert counters["evicted_blocks"] == 0
        wait_until(lambda: host.in_use() == (0, 0))
