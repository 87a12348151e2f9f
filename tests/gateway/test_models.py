"""Real models under the gateway's backend: the tokens are those of one process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest

from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.gateway.backend import GatewayBackend
from tests.gateway.backends import (
    FAR,
    HOME,
    THRESHOLD,
    answered,
    gateway_request,
    is_clean,
    moved,
    prompt,
    serving,
    until,
    until_it_would_resume,
    with_role,
)
from tests.gateway.conftest import Hosts
from tests.node.conftest import hf_options
from tests.node.hosts import Host, cached_of, tokens_of

# Three processes import torch, which takes a minute each where cores are busy. The ordinary tests
# hand over between real models in tests/node.
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
LENGTHS = (300, 1, 65, 193, 64, 2, 400, 129, 63, 257)
NEW_TOKENS = 4
_SALTS = count()


@pytest.fixture(scope="module")
def started() -> Iterator[dict[str, Hosts]]:
    """By the model they serve; tests leave them healthy."""
    found: dict[str, Hosts] = {}
    yield found
    for hosts in found.values():
        for host in hosts.all:
            host.close()


@pytest.fixture
def hosts(
    request: pytest.FixtureRequest,
    started: dict[str, Hosts],
    tmp_path_factory: pytest.TempPathFactory,
) -> Hosts:
    if request.param not in started:
        folder = tmp_path_factory.mktemp(request.param)
        make_checkpoint(folder / "model", request.param)
        options = hf_options(folder / "model")
        names = ("home0", "home1", "far0")
        made = [Host(folder / name, options, ("--node", name)) for name in names]
        started[request.param] = Hosts(folder / "model", made[:2], made[2:])
    found = started[request.param]
    for host in found.all:
        host.wait_until_ready()
    return found


def alone(host: Host, ids: list[int]) -> list[int]:
    """One process, nothing cached."""
    salt = f"reference {next(_SALTS)}"
    answer = host.complete(ids, max_tokens=NEW_TOKENS, cache_salt=salt)
    assert cached_of(answer) == 0
    return tokens_of(answer)


async def converse(backend: GatewayBackend, seed: int) -> list[tuple[list[int], list[int], bool]]:
    """Each turn's prompt, its answer, and whether it was offloaded."""
    ids = prompt(LENGTHS[seed % len(LENGTHS)], seed)
    turns = []
    for turn in range(2):
        asked = gateway_request(
            ids, NEW_TOKENS, conversation=True, stream=seed % 2 == 0, salt=f"tenant {seed % 3}"
        )
        found = await answered(backend, asked)
        turns.append((ids, found.tokens, found.trace.offloaded))
        ids = [*ids, *found.tokens, *prompt(40 + turn, seed)]
    return turns


@pytest.mark.parametrize(
    ("hosts", "conversations"),  # of two turns each; they have every length
    [("kimi-linear", 12), pytest.param("mimo", 12, marks=pytest.mark.grid)],
    indirect=["hosts"],
)
async def test_mixed_requests_at_once_are_answered_as_by_one_process(
    hosts: Hosts, conversations: int
) -> None:
    made = hosts.deployment(threshold_tokens=THRESHOLD // 5)

    async with serving(made) as backend:
        async with asyncio.TaskGroup() as group:
            talks = [group.create_task(converse(backend, seed)) for seed in range(conversations)]
        await until(lambda: is_clean(backend))
        assert backend.state()["retries"]["spent"] == 0
        turns = [turn for talk in talks for turn in talk.result()]
    for host in hosts.all:
        await asyncio.to_thread(host.wait_until_idle)
    assert {offloaded for *_, offloaded in turns} == {True, False}
    for ids, tokens, _ in turns:
        assert tokens == alone(hosts.home[0], ids), f"{len(ids)} tokens"


@pytest.mark.parametrize("hosts", ["kimi-linear"], indirect=True)
async def test_remainders_of_turns_are_answered_as_by_one_process(hosts: Hosts) -> None:
    """Each turn after the first runs on the decode node alone, where the last answer is kept, in
    chunks that are smaller than the engine's own."""
    made = hosts.deployment(
        policy="adaptive",
        links=[{"from": HOME, "to": HOME, "gbps": 0.1}],  # a copy takes long
        alone={"margin_s": 0.0, "chunk_tokens": 120},
    )
    ids, turns = prompt(300, 77), []
    async with serving(made) as backend:
        (decode,) = with_role(backend, "decode")
        for turn in range(3):
            asked = gateway_request(ids, 30, conversation=True, salt="turns")
            if turn:
                kept = (len(ids) - 91) // 64 * 64  # 90 new tokens follow the answer
                await until_it_would_resume(backend, asked, kept)
            found = await answered(backend, asked)
            if turn:
                assert found.trace.alone
                assert (found.trace.prefill, found.trace.decode) == (decode, decode)
                assert (found.trace.cached_tokens, found.trace.attempts) == (kept, 1)
            turns.append((ids, found.tokens))
            ids = [*ids, *found.tokens, *prompt(90, turn)]
        await until(lambda: is_clean(backend))
    for host in hosts.all:
        await asyncio.to_thread(host.wait_until_idle)
    for number, (ids, tokens) in enumerate(turns):
        answer = hosts.home[0].complete(ids, max_tokens=30, cache_salt=f"reference {number} turn")
        assert cached_of(answer) == 0
        assert tokens == tokens_of(answer), f"{len(ids)} tokens"


# Turns of one conversation: tokens that the user adds, the cluster that prefills the turn, and what
# of it is cached then, at the ends of whole blocks of 64. A turn is long above 200 new tokens.
TURNS = [(300, FAR, 0), (130, HOME, 256), (300, FAR, 384), (50, HOME, 704)]


@pytest.mark.parametrize("hosts", ["kimi-linear"], indirect=True)
async def test_a_conversation_takes_its_cache_along(hosts: Hosts) -> None:
    """Each turn resumes after the last one, wherever that was prefilled; only blocks that the
    cluster lacks travel, with the states at their end; the tokens are those of one process."""
    made = hosts.deployment(
        threshold_tokens=THRESHOLD // 5,
        links=[{"from": HOME, "to": FAR, "gbps": 1e5}],  # abundant
    )
    (far,) = hosts.far
    spec = far.spec()

    async with serving(made) as backend:
        (name,) = with_role(backend, "prefill")
        at = {HOME: hosts.named(name), FAR: far}
        held = {HOME: 0, FAR: 0}  # by the node that prefills there
        ids: list[int] = []
        turns = []
        for number, (more, cluster, cached) in enumerate(TURNS):
            ids = [*ids, *prompt(more, number)]
            asked = gateway_request(ids, NEW_TOKENS, conversation=True)
            await until_it_would_resume(backend, asked, cached)
            before = {c: (at[c].hit_tokens(), at[c].received_bytes()) for c in at}
            found = await answered(backend, asked)
            await until(lambda n=number: moved(backend, "route") == (n, 0))  # type: ignore[misc]
            assert (found.trace.cluster, found.trace.attempts) == (cluster, 1)
            hits, received = before[cluster]
            assert at[cluster].hit_tokens() - hits == cached
            copied = spec.kv_bytes(cached, held[cluster]) if cached else 0
            assert at[cluster].received_bytes() - received == copied
            await until(lambda s=found.trace, c=cached: s.cached_tokens == c)  # type: ignore[misc]
            held[cluster] = len(ids) // 64 * 64
            turns.append((ids, found.tokens))
            ids = [*ids, *found.tokens]
        await until(lambda: is_clean(backend))
    for host in hosts.all:
        await asyncio.to_thread(host.wait_until_idle)
    for ids, tokens in turns:
        assert tokens == alone(hosts.home[0], ids), f"{len(ids)} tokens"
