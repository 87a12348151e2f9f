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


def serve_prompt(engine: KvdClient, tokens: int = HELD, seed: int = 0) -> None:
    prompt = prompt_of(tokens, seed)
    lease = begun(engine.begin(names(prompt), tokens))
    fill(lease, prompt)
    lease.commit()


def kept(host: Host) -> int:
    counted = host.stats()["pool"]["counters"]["kept_answers"]
    assert isinstance(counted, int)
    return counted


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
        before = host.stats()["pool"]["occupancy"]["capacity_pages"]
        serve_prompt(engine)
        refused = engine.begin_answer(names(CONVERSATION), TOKENS, first_token=HELD)
        assert isinstance(refused, NotNow)
        with host.engine("keeper", keeps_answers=True):
            after = host.stats()["pool"]["occupancy"]["capacity_pages"]
            assert before * 31 // 32 <= after < before


def test_a_grant_is_given_while_answers_are_written(tmp_path: Path) -> None:
    """Every page is used by prefixes or answers. The grant evicts the prompt, so that the answer is
    not kept, and no page is lost."""
    store = StoreOptions(memory_bytes=128 << 10)
    with kvd(tmp_path, store=store) as host, host.engine(keeps_answers=True) as engine:
        serve_prompt(engine)
        lease = begun(engine.begin_answer(names(CONVERSATION), TOKENS, first_token=HELD))
        fill(lease, CONVERSATION)
        occupancy = host.stats()["pool"]["occupancy"]
        tokens = BLOCK
        granted = []
        while not isinstance(grant := host.open(prompt_of(tokens, seed=tokens)), NotNow):
            granted.append(grant)
            tokens += 4 * BLOCK
        used = host.stats()["pool"]["occupancy"]
        assert granted and used["capacity_pages"] == occupancy["capacity_pages"]
        for one in granted:
            host.post(f"/v1/transfers/{one.transfer_id}/abort", {"reason": "test"})
        try:
            lease.commit()
        except TransferFailed as error:
            assert "lost the prefix" in str(error)
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
    store = StoreOptions(memory_bytes=128 << 10, ssd=tmp_path, ssd_bytes=1 << 20)
    with kvd(tmp_path, store=store) as host, host.engine(keeps_answers=True) as engine:
        capacity = host.stats()["pool"]["occupancy"]["capacity_pages"]
        serve_prompt(engine)
        seed = 1
        while host.stats()["pool"]["occupancy"]["used_pages"] < capacity - 10:
            serve_prompt(engine, 4 * BLOCK, seed)
            seed += 1
        for turn in range(1, 4):
            lease = engine.begin_answer(
                names(CONVERSATION[: HELD + turn * BLOCK]),
                HELD + turn * BLOCK,
                first_token=HELD + (turn - 1) * BLOCK,
            )
            if not isinstance(lease, NotNow):
                fill(lease, CONVERSATION)
                lease.commit()
        pool = host.stats()["pool"]
        assert pool["counters"]["kept_answers"] > 0
        wait_until(lambda: host.stats()["pool"]["occupancy"]["used_pages"] <= capacity)
        assert host.in_use() == (0, 0)
