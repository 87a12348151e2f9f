"""The gate between an engine and its kvd: transparent, or nothing leaves before the commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prfaas.errors import ConnectionLost
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas_lab.testing.ready_gate import ReadyGate
from tests.cache.builders import BLOCK
from tests.kvd.hosts import (
    COMPAT,
    SPEC,
    Host,
    assert_holds,
    begun,
    fill,
    kvd,
    names,
    prompt_of,
)
from tests.waiting import PATIENCE_S, wait_until

TOKENS = 40
PROMPT = prompt_of(TOKENS)


@contextmanager
def engine(path: Path) -> Iterator[KvdClient]:
    with KvdClient(
        path, engine_id="behind", spec=SPEC, block_tokens=BLOCK, compat=COMPAT
    ) as client:
        yield client


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    with kvd(tmp_path, name="p") as here, kvd(tmp_path, name="d") as there:
        yield here, there


@pytest.mark.parametrize("holding", [False, True])
def test_state_leaves_at_once_or_with_the_commit(
    tmp_path: Path, hosts: tuple[Host, Host], holding: bool
) -> None:
    here, there = hosts
    with (
        ReadyGate(tmp_path / "gate", here.socket) as gate,
        engine(gate.path) as prefill,
        engine(gate.path) as rank,
        there.engine() as decode,
    ):
        gate.holding = holding
        assert gate.registered.get(timeout=PATIENCE_S).compat == COMPAT
        grant = there.grant(PROMPT)
        lease = begun(prefill.begin(names(PROMPT), TOKENS, grant=grant))
        fill(rank.join_write(lease.ticket), PROMPT)  # the owner commits, another process writes
        rank.flush()
        if holding:
            assert there.received_bytes() == 0
        else:
            assert there.settled(grant)["state"] == "committed"
        assert gate.commits.empty()
        lease.commit()
        gate.commits.get(timeout=PATIENCE_S)
        assert there.settled(grant)["state"] == "committed"
        with decode.attach(grant.transfer_id) as state:
            assert_holds(state, PROMPT, TOKENS)


def test_whoever_goes_is_missed_on_the_other_side(tmp_path: Path, hosts: tuple[Host, Host]) -> None:
    here, _ = hosts
    with ReadyGate(tmp_path / "gate", here.socket) as gate:
        with engine(gate.path) as prefill:
            begun(prefill.begin(names(PROMPT), TOKENS))
            assert here.in_use()[1] == 1
        wait_until(lambda: here.in_use() == (0, 0))
        left = KvdClient(gate.path, engine_id="left", spec=SPEC, block_tokens=BLOCK, compat=COMPAT)
    with pytest.raises(ConnectionLost):
        left.flush()
    left.close()
