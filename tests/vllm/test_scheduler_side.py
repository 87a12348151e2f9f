"""Hand-offs between two of vLLM's real schedulers over real kvds, without an engine."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.contracts.kvd_api import OTHER_PROMPT
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.types import Grant
from tests.vllm import kvds
from tests.vllm.engine_free import FAILED, STEP_TOKENS, EngineFree
from tests.vllm.models import BLOCK_TOKENS, falcon, gemma
from tests.waiting import wait_until

CACHES = {
    "falcon": lambda: falcon("none"),
    "falcon-cached": lambda: falcon("align"),
    "gemma": gemma,
    "gemma-cached": gemma,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory / "falcon", "falcon-h1")
    return directory / "falcon"


@dataclass(slots=True)
class Pair:
    """A prefill engine and a decode engine, each with its kvd, and the gateway between them."""

    prefill: EngineFree
    decode: EngineFree
    source: kvds.Kvd
    target: kvds.Kvd

    def grant(self, prompt: list[int], tokens: int, checkpoint: int | None = None) -> Grant:
        grant = self.target.open(prompt, tokens, self.source.compat(), checkpoint)
        assert isinstance(grant, Grant), grant
        return grant

    def hand_off(self, name: str, prompt: list[int], tokens: int) -> Any:
        """What the prefill side has computed, and the decode side's parameters."""
        grant = self.grant(prompt, tokens)
        request = self.prefill.add(name, prompt, asking(grant, tokens))
        params = self.prefill.run(name)
        assert request.num_prompt_tokens == tokens
        assert self.target.status(grant.transfer_id, wait_s=10).state == "committed"
        return params

    def idle(self) -> None:
        for engine in (self.prefill, self.decode):
            wait_until(
                lambda e=engine: e.step() is not None and e.scheduler.kv_cache_manager.usage == 0
            )
        wait_until(self.source.idle)
        wait_until(self.target.idle)


def _no_block_in_use(engine: EngineFree) -> bool:
    engine.step()
    return engine.scheduler.kv_cache_manager.usage == 0


def asking(grant: Grant, tokens: int) -> dict[str, Any]:
    return {
        "do_remote_decode": True,
        "grant": msgspec.to_builtins(grant),
        "handoff_tokens": tokens,
    }


@pytest.fixture(scope="module", params=list(CACHES))
def pair(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    tmp_path = tmp_path_factory.mktemp("kvds")
    caches, cached = CACHES[request.param], request.param.endswith("cached")
    with kvds.kvd(tmp_path / "p") as source, kvds.kvd(tmp_path / "d") as target:
        engines = [
            EngineFree(checkpoint, caches(), kvd.socket, prefix_caching=cached)
            for kvd in (source, target)
        ]
        try:
            yield Pair(*engines, source, target)
        finally:
            for engine in engines:
                engine.close()


def prompt_of(tokens: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{tokens} {seed}")
    return [rng.randrange(1, 250) for _ in range(tokens)]


TAIL = 30


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 255, 256, 257, 700, 768])
def test_what_is_loaded_is_what_was_computed(pair: Pair, tokens: int) -> None:
    prompt = prompt_of(tokens + TAIL)
    name = f"both-{tokens}"
    params = pair.hand_off(name, prompt, tokens)
    assert params["do_remote_prefill"] and params["handoff_tokens"] == tokens
    request = pair.decode.add(name, prompt, params)
    pair.decode.run(name)
    assert pair.decode.resumed[name] == pair.prefill.left[name]
    assert request.num_prompt_tokens == tokens + TAIL
    assert pair.target.status(params["transfer_id"]).reason == ""
    pair.idle()


def test_steps_in_which_requests_only_wait_say_so(pair: Pair) -> None:
    """The workers let them last, see `idle_steps`."""
    prompt = prompt_of(300 + TAIL, seed=12)
    params = pair.hand_off("waits", prompt, 300)
    may_load = threading.Event()
    pair.decode.worker._threads.submit(may_load.wait)  # the load comes after it
    try:
        pair.decode.add("waits", prompt, params)
        steps = [pair.decode.step() for _ in range(3)]
    finally:
        may_load.set()
    assert [order.request_id for orders in steps for order in orders.loads] == ["waits"]
    assert not any(orders.computes for orders in steps)
    wait_until(lambda: pair.decode.step().computes)
    pair.decode.run("waits")
    pair.idle()


def test_a_second_turn_resumes_on_both_sides(pair: Pair) -> None:
    conversation = prompt_of(1000, seed=1)
    for name, tokens in (("turn-1", 512), ("turn-2", 896)):
        params = pair.hand_off(name, conversation[: tokens + TAIL], tokens)
        pair.decode.add(name, conversation[: tokens + TAIL], params)
        pair.decode.run(name)
        assert pair.decode.resumed[name] == pair.prefill.left[name]
    assert pair.prefill.resumed["turn-2"] == pair.prefill.left["turn-1"]
    pair.idle()


def test_a_prefill_that_the_kvd_has_whole_computes_one_token(pair: Pair) -> None:
    prompt = prompt_of(600, seed=9)
    first = pair.hand_off("once", prompt, 512)
    grant = pair.grant(prompt, 512)
    # As gateways do: the prompt of a prefill ends with the hand-off.
    request = pair.prefill.add("again", prompt[:512], asking(grant, 512))
    assert pair.prefill.run("again")["do_remote_prefill"]
    assert request.num_prompt_tokens == 513
    assert pair.prefill.resumed["again"] == pair.prefill.left["once"]
    assert pair.target.status(grant.transfer_id, wait_s=10).state == "committed"
    for transfer_id in (first["transfer_id"], grant.transfer_id):
        pair.target.abort(transfer_id)  # no request decodes it
    pair.idle()


def test_a_branch_is_loaded_where_only_attention_is_cached(pair: Pair) -> None:
    longer = prompt_of(1000, seed=2)
    params = pair.hand_off("longer", longer, 896)
    pair.decode.add("longer", longer, params)
    pair.decode.run("longer")
    branch = longer[:600]
    params = pair.hand_off("branch", branch, 512)
    pair.decode.add("branch", branch, params)
    pair.decode.run("branch")
    # Resumed after the hand-off, not computed from the start.
    assert pair.decode.resumed["branch"] == pair.prefill.left["branch"]
    pair.idle()


def test_blocks_leave_while_later_ones_are_computed(pair: Pair) -> None:
    prompt = prompt_of(1024, seed=3)
    grant = pair.grant(prompt, 1000)
    pair.prefill.add("early", prompt, asking(grant, 1000))
    pair.prefill.step()
    assert pair.prefill.scheduler.requests["early"].num_computed_tokens < 1000
    wait_until(lambda: pair.target.report().arrivals.received_bytes > 0)
    pair.prefill.run("early")
    assert pair.target.status(grant.transfer_id, wait_s=10).state == "committed"
    pair.target.abort(grant.transfer_id)
    pair.idle()


def test_a_transfer_that_has_failed_is_told_at_the_end_of_the_prefill(pair: Pair) -> None:
    """The kvd knows that the receiver takes nothing any more. A response that promised the state
    would have the gateway wait until the grant expires."""
    prompt = prompt_of(1000, seed=14)
    grant = pair.grant(prompt, 896)
    pair.prefill.add("refused", prompt, asking(grant, 896))
    pair.prefill.step()
    pair.target.abort(grant.transfer_id)
    requests = pair.prefill.scheduler.connector._scheduler._requests
    wait_until(lambda: requests["refused"].lease.sent.done())
    params = pair.prefill.run("refused")
    assert not params["do_remote_prefill"] and params["error"]["code"] == "transfer_lost", params
    pool = pair.source.report().pool
    assert pool is not None and pool.occupancy.idle_pages > 0, "what was computed is kept"
    pair.idle()


def test_an_aborted_prefill_gives_everything_back(pair: Pair) -> None:
    prompt = prompt_of(1000, seed=4)
    grant = pair.grant(prompt, 999)
    pair.prefill.add("gone", prompt, asking(grant, 999))
    pair.prefill.step()
    pair.prefill.abort("gone")
    pair.idle()
    assert pair.target.status(grant.transfer_id).state == "failed"


def test_an_aborted_load_gives_everything_back(pair: Pair) -> None:
    prompt = prompt_of(1000, seed=5)
    params = pair.hand_off("aborted", prompt, 999)
    pair.decode.add("aborted", prompt, params)
    steps = pair.decode.step()
    assert [load.request_id for load in steps.loads] == ["aborted"]
    pair.decode.abort("aborted")
    pair.idle()


@pytest.mark.parametrize("aborted", [False, True])
def test_continuations_load_the_same_transfer(pair: Pair, aborted: bool) -> None:
    """vLLM makes `n` requests of one, all with its parameters."""
    prompt = prompt_of(600, seed=20 + aborted)
    params = {**pair.hand_off(f"parent-{aborted}", prompt, 599), "attachments": 3}
    names = [f"{index}_parent-{aborted}" for index in range(3)]
    for name in names:
        pair.decode.add(name, prompt, params)
    if aborted:
        pair.decode.abort(names.pop(0))
    for name in names:
        assert pair.decode.run(name) != FAILED
        assert pair.decode.resumed[name] == pair.prefill.left[f"parent-{aborted}"]
    pair.idle()
    assert pair.target.status(params["transfer_id"]).state == "released"
    pair.decode.add(f"more-{aborted}", prompt, params)
    assert pair.decode.run(f"more-{aborted}") == FAILED


@pytest.mark.parametrize("params", [{"transfer_id": "unknown"}, {}])
def test_a_lost_transfer_fails_the_request_alone(pair: Pair, params: dict[str, str]) -> None:
    name = f"lost-{len(params)}"
    pair.decode.add(name, prompt_of(300), {"do_remote_prefill": True, **params})
    assert pair.decode.run(name) == FAILED
    pair.decode.add(f"{name}-after", prompt_of(300))
    assert pair.decode.run(f"{name}-after") != FAILED
    pair.idle()


def test_a_transfer_longer_than_the_prompt_is_no_answer(pair: Pair) -> None:
    prompt = prompt_of(256, seed=6)
    params = pair.hand_off("whole", prompt, 256)
    pair.decode.add("whole", prompt, params)
    assert pair.decode.run("whole") == FAILED
    pair.idle()


def test_a_transfer_of_another_prompt_is_no_answer(pair: Pair) -> None:
    params = pair.hand_off("mine", prompt_of(256, seed=8), 255)
    pair.decode.add("mine", prompt_of(256, seed=9), params)
    assert pair.decode.run("mine") == FAILED
    # vLLM's response is the same for any failure; the kvd's status has the reason for gateways.
    status = pair.target.status(params["transfer_id"])
    assert (status.state, status.reason) == ("released", OTHER_PROMPT)
    pair.idle()


@pytest.mark.parametrize("tokens", [255, 100])
def test_a_transfer_of_a_prompt_with_another_end_is_no_answer(pair: Pair, tokens: int) -> None:
    """Equal in every whole block, or too short to have one; the state is of other tokens."""
    prompt = prompt_of(tokens + 1, seed=10)
    params = pair.hand_off(f"end-{tokens}", prompt, tokens)
    prompt[tokens - 1] += 1
    pair.decode.add(f"end-{tokens}", prompt, params)
    assert pair.decode.run(f"end-{tokens}") == FAILED
    pair.idle()


@pytest.mark.parametrize(
    "params",
    [
        {"grant": None},
        {"do_remote_prefill": True, "transfer_id": "both"},
        {"handoff_tokens": 301},
    ],
)
def test_a_malformed_prefill_is_told_and_not_computed(
    pair: Pair, params: dict[str, object]
) -> None:
    name = f"malformed-{next(iter(params))}"
    grant = pair.grant(prompt_of(300), 128)
    asked = {**asking(grant, 128), **params}
    request = pair.prefill.add(name, prompt_of(300), asked)
    answer = pair.prefill.run(name)
    if "do_remote_prefill" in params:
        assert answer == FAILED
    else:
        assert answer["error"]["code"] == "invalid_request"
        assert request.num_prompt_tokens == 1
    pair.target.abort(grant.transfer_id)
    pair.idle()


def test_a_state_that_was_not_kept_is_an_error(pair: Pair) -> None:
    """The receiver wants a checkpoint inside a step: windows have one there, states have not."""
    prompt = prompt_of(STEP_TOKENS + 44, seed=7)
    grant = pair.grant(prompt, STEP_TOKENS + 1, checkpoint=BLOCK_TOKENS)
    pair.prefill.add("inside", prompt, asking(grant, STEP_TOKENS + 1))
    answer = pair.prefill.run("inside")
    if any(group.kind == "state" for group in pair.prefill.layout.groups):
        assert "after 128 tokens was not kept" in answer["error"]["message"]
    else:
        assert answer["do_remote_prefill"]
        assert pair.target.status(grant.transfer_id, wait_s=10).state == "committed"
        pair.target.abort(grant.transfer_id)
    pair.idle()


def test_no_room_is_a_refusal_before_anything_is_computed(checkpoint: Path, tmp_path: Path) -> None:
    with kvds.kvd(tmp_path / "p", 1 << 20) as source, kvds.kvd(tmp_path / "d") as target:
        engines = [EngineFree(checkpoint, falcon(), kvd.socket) for kvd in (source, target)]
        try:
            both = Pair(*engines, source, target)
            prompt = prompt_of(1000)
            grant = both.grant(prompt, 999)
            request = both.prefill.add("p", prompt, asking(grant, 999))
            answer = both.prefill.run("p")
            assert answer["error"]["code"] == "overloaded" and not answer["do_remote_prefill"]
            assert request.num_prompt_tokens == 1
            target.abort(grant.transfer_id)
            both.idle()
        finally:
            for engine in engines:
                engine.close()
