"""Real models behind the gateway's back: the tokens are those of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.gateway.backend import Back
from tests.gateway.backs import THRESHOLD, answered, ask, is_clean, prompt, serving, until
from tests.gateway.conftest import Hosts
from tests.node.conftest import hf_options
from tests.node.hosts import Host, cached_of, tokens_of

# Three processes import torch, which takes a minute each where cores are busy.
pytestmark = pytest.mark.timeout(600)
LENGTHS = (300, 1, 65, 193, 64, 2, 400, 129, 63, 257)
NEW_TOKENS = 4
_SALTS = count()


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hosts]:
    make_checkpoint(tmp_path / "model", request.param)
    options = hf_options(tmp_path / "model")
    names = ("home0", "home1", "far0")
    started = [Host(tmp_path / name, options, ("--node", name)) for name in names]
    try:
        for host in started:
            host.wait_until_ready()
        yield Hosts(tmp_path / "model", started[:2], started[2:])
    finally:
        for host in started:
            host.close()


def alone(host: Host, ids: list[int]) -> list[int]:
    """One process, nothing cached."""
    salt = f"reference {next(_SALTS)}"
    answer = host.complete(ids, max_tokens=NEW_TOKENS, cache_salt=salt)
    assert cached_of(answer) == 0
    return tokens_of(answer)


async def converse(back: Back, seed: int) -> list[tuple[list[int], list[int], bool]]:
    """Each turn's prompt, its answer, and whether it was offloaded."""
    ids = prompt(LENGTHS[seed % len(LENGTHS)], seed)
    turns = []
    for turn in range(2):
        asked = ask(
            ids, NEW_TOKENS, conversation=True, stream=seed % 2 == 0, salt=f"tenant {seed % 3}"
        )
        found = await answered(back, asked)
        turns.append((ids, found.tokens, found.story.offloaded))
        ids = [*ids, *found.tokens, *prompt(40 + turn, seed)]
    return turns


@pytest.mark.parametrize(
    ("hosts", "conversations"),  # of two turns each
    [
        ("kimi-linear", 6),
        pytest.param("kimi-linear", 25, marks=pytest.mark.slow),
        pytest.param("mimo", 25, marks=pytest.mark.slow),
    ],
    indirect=["hosts"],
)
def test_mixed_requests_at_once_are_answered_as_by_one_process(
    hosts: Hosts, conversations: int
) -> None:
    made = hosts.deployment(threshold_tokens=THRESHOLD // 5)

    async def main() -> list[tuple[list[int], list[int], bool]]:
        async with serving(made) as back:
            async with asyncio.TaskGroup() as group:
                talks = [group.create_task(converse(back, seed)) for seed in range(conversations)]
            await until(lambda: is_clean(back))
            assert back.state()["retries"]["spent"] == 0
            return [turn for talk in talks for turn in talk.result()]

    turns = asyncio.run(main())
    for host in hosts.all:
        host.wait_until_idle()
    assert {offloaded for *_, offloaded in turns} == {True, False}
    for ids, tokens, _ in turns:
        assert tokens == alone(hosts.home[0], ids), f"{len(ids)} tokens"
