"""Answers of vLLM's real scheduler that a real kvd keeps, without an engine."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.kv_cache_interface import KVCacheConfig

from tests.vllm import kvds
from tests.vllm.engine_free import EngineFree
from tests.vllm.models import BLOCK_TOKENS, config, falcon, full, gemma
from tests.vllm.test_scheduler_side import checkpoint, prompt_of
from tests.waiting import wait_until

__all__ = ["checkpoint"]
PROMPT, ANSWER = 300, 150
KEPT = (PROMPT + ANSWER - 1) // BLOCK_TOKENS * BLOCK_TOKENS
SAMPLED = 7  # every token of every answer
CACHES: dict[str, Callable[[], KVCacheConfig]] = {
    "attention": lambda: config((full(), ["l0", "l1"])),
    "falcon": lambda: falcon("none"),
    "falcon-aligned": lambda: falcon("align"),
    "gemma": gemma,
}


ONE_MODEL = pytest.mark.parametrize("node", ["falcon-aligned"], indirect=True)


class Node:
    """A kvd, and engines that come and go: what one of them has kept serves the next one."""

    def __init__(self, kvd: kvds.Kvd, make: Callable[..., EngineFree]) -> None:
        self.kvd = kvd
        self.engine = make()
        self._make = make

    def restart(self, **options: Any) -> EngineFree:
        self.engine.close()
        self.engine = self._make(**options)
        return self.engine

    @property
    def kept_answers(self) -> int:
        return self.kvd.pool().counters.kept_answers

    def keep(self, prompt: list[int]) -> None:
        """Answers the prompt, and returns when the kvd has kept the answer. For the first one."""
        self.engine.add("kept", prompt, max_tokens=ANSWER)
        self.engine.run("kept")
        self.settle()
        wait_until(lambda: self.kept_answers == 1)

    def settle(self) -> None:
        """Steps until no block is in use."""
        manager = self.engine.scheduler.kv_cache_manager
        wait_until(lambda: self.engine.step() is not None and manager.usage == 0)
        wait_until(self.kvd.idle)


@pytest.fixture(params=list(CACHES))
def node(request: pytest.FixtureRequest, checkpoint: Path, tmp_path: Path) -> Iterator[Node]:
    def make(**options: Any) -> EngineFree:
        cached = request.param.endswith("aligned")
        return EngineFree(
            checkpoint, CACHES[request.param](), kvd.socket, prefix_caching=cached, **options
        )

    with kvds.kvd(tmp_path / "kvd") as kvd:
        made = Node(kvd, make)
        try:
            yield made
        finally:
            made.engine.close()


def conversation(seed: int) -> tuple[list[int], list[int]]:
    """A prompt, and the prompt of the next turn."""
    first = prompt_of(PROMPT, seed)
    return first, [*first, *[SAMPLED] * ANSWER, *prompt_of(100, seed + 1)]


def computed_alone(node: Node, tokens: list[int]) -> dict[str, list[bytes]]:
    """What the blocks hold after these tokens, computed without the kvd."""
    engine = node.restart(keep_answers=False)
    engine.add("alone", tokens)
    engine.run("alone")
    return engine.left["alone"]


def test_the_next_turn_resumes_where_the_answer_ended(node: Node) -> None:
    first, second = conversation(seed=1)
    node.keep(first)
    engine = node.restart()  # vLLM's own prefix cache is empty
    engine.add("second", second)
    engine.run("second")
    resumed = engine.resumed["second"]
    node.settle()
    assert resumed == computed_alone(node, second[:KEPT])


def test_an_aborted_request_is_kept_so_far(node: Node) -> None:
    first, second = conversation(seed=2)
    request = node.engine.add("first", first, max_tokens=10 * ANSWER)
    wait_until(
        lambda: node.engine.step() is not None and request.num_output_tokens == ANSWER,
    )
    node.engine.abort("first")
    node.settle()
    wait_until(lambda: node.kept_answers == 1)
    engine = node.restart()
    engine.add("second", second)
    engine.run("second")
    resumed = engine.resumed["second"]
    node.settle()
    assert resumed == computed_alone(node, second[:KEPT])


@ONE_MODEL
def test_an_answer_before_its_first_boundary_is_not_kept(node: Node) -> None:
    node.engine.add("short", prompt_of(BLOCK_TOKENS // 4), max_tokens=BLOCK_TOKENS // 2)
    node.engine.run("short")
    node.settle()
    assert not node.kept_answers and node.kvd.pool().occupancy.used_pages == 0


def test_a_preempted_request_is_not_kept(node: Node) -> None:
    first, _ = conversation(seed=3)
    request = node.engine.add("first", first, max_tokens=ANSWER)
    wait_until(lambda: node.engine.step() is not None and request.num_output_tokens == 2)
    assert node.engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    node.engine.run("first")
    assert request.num_preemptions == 1
    node.settle()
    assert not node.kept_answers and node.kvd.pool().occupancy.used_pages == 0


@ONE_MODEL
def test_a_kvd_that_exits_fails_no_request(node: Node) -> None:
    first, _ = conversation(seed=4)
    request = node.engine.add("first", first, max_tokens=ANSWER)
    wait_until(lambda: node.engine.step() is not None and request.num_output_tokens > 0)
    kvds.stop(node.kvd)
    node.engine.run("first")
    manager = node.engine.scheduler.kv_cache_manager
    wait_until(lambda: node.engine.step() is not None and manager.usage == 0)
    assert request.num_output_tokens == ANSWER


@ONE_MODEL
def test_nothing_is_kept_or_looked_up_when_it_is_switched_off(node: Node) -> None:
    first, second = conversation(seed=5)
    node.keep(first)
    before = node.kvd.pool().counters
    engine = node.restart(keep_answers=False)
    engine.add("second", second, max_tokens=ANSWER)
    steps = []
    wait_until(lambda: steps.append(engine.step()) or "second" in engine.answers)
    assert "second" not in engine.resumed
    assert not any(step.boundaries or step.keeps for step in steps)
    assert node.kvd.pool().counters == before


@ONE_MODEL
def test_a_request_is_computed_when_the_kvd_does_not_answer_in_time(node: Node) -> None:
    first, second = conversation(seed=6)
    node.keep(first)
    engine = node.restart()
    node.kvd.process.send_signal(signal.SIGSTOP)
    try:
        engine.add("second", second)
        engine.run("second")
        assert "second" not in engine.resumed
        assert engine.counts["late_lookups"] == 1
    finally:
        node.kvd.process.send_signal(signal.SIGCONT)
    node.settle()
