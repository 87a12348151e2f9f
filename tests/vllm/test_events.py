"""vLLM's own cache events, by way of the kvd, and those of the kvd's pools feed a gateway's index:
what it predicts to be cached is what vLLM finds, states at aligned blocks, windows, evictions and
kept answers included."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from prfaas.cache.groups import rules_for
from prfaas.cache.hashing import PromptHashes, block_hashes
from prfaas.cache.index import NodeInfo
from prfaas.cache.manager import GlobalKVManager
from prfaas.contracts.kvd_api import PoolReport, spec_of
from prfaas.types import ClusterId, NodeId
from tests.vllm.cases import BLOCK, MAX_TOKENS, PROMPTS, WITH_CACHE, Case, case_id
from tests.vllm.kvds import Kvd
from tests.waiting import wait_until

pytestmark = pytest.mark.timeout(900)  # servers start and stop within it

_LOG = logging.getLogger(__name__)
CONVERSATIONS, TURNS = 8, 5
PRESSURE_AFTER = 3  # turns; then prompts that no conversation shares push some of them out
PRESSURE_PROMPTS, PRESSURE_TOKENS = 7, 3900


class GatewayIndex:
    """A gateway that reads, from one kvd, the events of the engine's own cache and of the pools."""

    def __init__(self, kvd: Kvd) -> None:
        report = kvd.report()
        assert report.pool is not None
        (engine,) = report.engines
        self.manager = GlobalKVManager(spec_of(report.pool.groups))
        self.engine = NodeId(engine.engine_id)
        self.removals = 0  # from the engine's own cache
        self._kvd = kvd
        self._next = {self.engine: -1}
        self._join(self.engine, report.pool)
        for pool in report.pools:
            name = NodeId(pool.name or report.node)
            self._next[name] = -1
            self._join(name, pool)

    def _join(self, name: NodeId, pool: PoolReport) -> None:
        rules = rules_for(spec_of(pool.groups))
        self.manager.join(NodeInfo(name, ClusterId("pd"), pool.block_tokens, rules))

    def read(self) -> None:
        for name, since in self._next.items():
            page = self._kvd.events(name, since)
            if page.snapshot is not None:
                assert self.manager.snapshot(name, page.snapshot, page.next_seq)
            for event in page.events:
                assert self.manager.apply(event)
                self.removals += name == self.engine and event.action == "removed"
            self._next[name] = page.next_seq

    def resumable_tokens(self, prompt: list[int]) -> int:
        """From the engine's own cache or from what its kvd keeps. An engine computes at least the
        last token."""
        match = self.manager.match(PromptHashes(prompt[:-1]))
        return max(match.node_tokens(name) for name in self._next)

    def knows(self, tokens: list[int]) -> bool:
        """Every whole block of what the engine has just computed."""
        self.read()
        found = self.manager.match(PromptHashes(tokens)).nodes.get(self.engine)
        whole = len(tokens) // BLOCK * BLOCK
        return whole == 0 or (found is not None and found.attention_tokens == whole)


def requests() -> Iterator[tuple[int, int]]:
    """(conversation, turn), every conversation interrupted by all the others. Negative: one of the
    prompts that press."""
    for turn in range(TURNS):
        if turn == PRESSURE_AFTER:
            yield from ((-1 - number, 0) for number in range(PRESSURE_PROMPTS))
        yield from ((number, turn) for number in range(CONVERSATIONS))


@pytest.mark.parametrize("case", WITH_CACHE, indirect=True, ids=case_id)
def test_predictions_are_what_vllm_finds(case: Case) -> None:
    index = GatewayIndex(case.pair.source)
    history: dict[int, list[int]] = {}
    predicted: list[int] = []
    reported: list[int] = []
    for number, turn in requests():
        chance = random.Random(f"{number} {turn}")
        if number < 0:
            prompt = chance.choices(range(256), k=PRESSURE_TOKENS)
        else:  # two conversations begin alike
            begun = history.get(number) or random.Random(number // 2).choices(range(256), k=400)
            prompt = begun + chance.choices(range(256), k=chance.randrange(20, 300))
        index.read()
        predicted.append(index.resumable_tokens(prompt))
        answer = case.pair.prefill.complete(prompt, MAX_TOKENS)
        reported.append(answer.cached_tokens)
        history[number] = prompt + answer.generated.tokens
        # The last token of an answer is never computed.
        wait_until(lambda n=number: index.knows(history[n][:-1]) and case.pair.source.idle())
    index.manager.check()
    right = sum(p == r for p, r in zip(predicted, reported, strict=True))
    _LOG.info("%s of %s predictions are right", right, len(reported))
    wrong = [pair for pair in zip(predicted, reported, strict=True) if pair[0] != pair[1]]
    assert right >= 0.95 * len(reported), f"{right} of {len(reported)}; (predicted, found): {wrong}"
    assert sum(reported) > 0 and index.removals > 0, "nothing was found, or nothing pushed out"


def test_events_bring_hashes_of_what_was_computed(case: Case) -> None:
    prompt = PROMPTS["edges"][4]
    report = case.pair.source.report()
    (engine,) = report.engines
    assert report.pool is not None
    case.pair.prefill.complete(prompt, 1)
    # In the blocks of the form that counts for routing, as far as vLLM's own blocks are full.
    computed = prompt[: len(prompt) // BLOCK * BLOCK]
    names = set(block_hashes(computed, report.pool.block_tokens))

    def held() -> set[bytes]:
        snapshot = case.pair.source.events(engine.engine_id, -1).snapshot
        assert snapshot is not None
        return {name for group in snapshot.values() for name in group}

    if case.cached:
        wait_until(lambda: names <= held())
    else:
        assert not held()
