"""Whatever a request carries and whatever fails inside the connector: that request ends with an
error, the engine and its other requests go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from prfaas.integrations.vllm import scheduler_side
from prfaas.integrations.vllm.caches.groups import Move
from prfaas.integrations.vllm.scheduler_side import SchedulerSide
from prfaas.integrations.vllm.steps import LoadOrder, SaveOrder, StepOrders
from prfaas.integrations.vllm.worker_side import WorkerSide
from tests.vllm import kvds
from tests.vllm.engine_free import FAILED, EngineFree
from tests.vllm.models import BLOCK_TOKENS, falcon
from tests.vllm.test_scheduler_side import TAIL, Pair, asking, checkpoint, prompt_of

__all__ = ["checkpoint"]
TOKENS = 300
HIDDEN = 8


@pytest.fixture(scope="module")
def pair(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp("kvds")
    with kvds.kvd(folder / "p") as source, kvds.kvd(folder / "d") as target:
        engines = [EngineFree(checkpoint, falcon(), kvd.socket) for kvd in (source, target)]
        try:
            yield Pair(*engines, source, target)
        finally:
            for engine in engines:
                engine.close()


@pytest.fixture(autouse=True)
def unharmed(pair: Pair) -> Iterator[None]:
    """After every test both engines serve, and nothing is held."""
    yield
    prompt = prompt_of(TOKENS + TAIL, seed=99)
    params = pair.hand_off("after", prompt, TOKENS)
    pair.decode.add("after", prompt, params)
    pair.decode.run("after")
    assert pair.decode.resumed["after"] == pair.prefill.left["after"]
    for engine in (pair.prefill, pair.decode):
        for name in list(engine.answers):
            for seen in (engine.answers, engine.resumed, engine.left):
                seen.pop(name, None)
    pair.idle()


def add(engine: EngineFree, name: str, params: Any, **prompt: Any) -> Request:
    """A request as vLLM makes it, with any kind of prompt."""
    extra = {"kv_transfer_params": params}
    sampling = SamplingParams(max_tokens=1, ignore_eos=True, extra_args=extra)
    request = Request(name, prompt.pop("ids", None), sampling, None, **prompt)
    sampling.update_from_generation_config({}, None)
    engine.scheduler.add_request(request)
    return request


def embeds(tokens: int) -> torch.Tensor:
    return torch.zeros(tokens, HIDDEN)


def side(engine: EngineFree) -> SchedulerSide:
    found = engine.scheduler.connector._scheduler
    assert isinstance(found, SchedulerSide)
    return found


# Requests -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("grant", ["valid", "none"])
@pytest.mark.parametrize("mixed", [False, True], ids=["embeddings", "mixed"])
def test_embeddings_are_not_handed_off(pair: Pair, grant: str, mixed: bool) -> None:
    """Hashes are of token ids: the state of embeddings would get the name of another prompt."""
    ids = prompt_of(TOKENS, seed=1)
    granted = pair.grant(ids, TOKENS)
    params = asking(granted, TOKENS) if grant == "valid" else {"do_remote_decode": True}
    more = {"ids": ids, "prompt_is_token_ids": [True] * 10 + [False] * (TOKENS - 10)}
    request = add(
        pair.prefill, "embeds", params, prompt_embeds=embeds(TOKENS), **(more if mixed else {})
    )
    answer = pair.prefill.run("embeds")
    assert answer["error"]["code"] == "invalid_request" and not answer["do_remote_prefill"]
    assert request.num_prompt_tokens == 1 == request.num_tokens - request.num_output_tokens
    pair.target.abort(granted.transfer_id)


@pytest.mark.parametrize("mixed", [False, True], ids=["embeddings", "mixed"])
def test_embeddings_are_not_continued_from_a_transfer(pair: Pair, mixed: bool) -> None:
    ids = prompt_of(TOKENS + TAIL, seed=2)
    params = pair.hand_off("before", ids, TOKENS)
    more: dict[str, Any] = {"prompt_embeds": embeds(len(ids))}
    if mixed:
        more |= {"ids": ids, "prompt_is_token_ids": [True] * TOKENS + [False] * TAIL}
    add(pair.decode, "embeds", params, **more)
    assert pair.decode.run("embeds") == FAILED
    # The state would be held for a retry until its time is over.
    pair.target.abort(params["transfer_id"])


def test_embeddings_without_a_hand_off_are_served(pair: Pair) -> None:
    add(pair.prefill, "plain", None, prompt_embeds=embeds(10))
    assert pair.prefill.run("plain") is None


@pytest.mark.parametrize("params", ["do_remote_decode", ["do_remote_prefill"], 7, 1.5])
def test_parameters_that_are_not_an_object_are_refused(pair: Pair, params: Any) -> None:
    """vLLM's `vllm_xargs` lets them through."""
    request = add(pair.prefill, "odd", params, ids=prompt_of(TOKENS))
    answer = pair.prefill.run("odd")
    assert answer["error"]["code"] == "invalid_request"
    assert request.num_prompt_tokens == 1


def test_an_error_of_any_length_and_spelling_can_be_answered(pair: Pair) -> None:
    grant = {"\ud800" * 100_000: 1}
    params = {"do_remote_decode": True, "grant": grant}
    add(pair.prefill, "long", params, ids=prompt_of(TOKENS))
    message = pair.prefill.run("long")["error"]["message"]
    assert len(message) < 2_000 and message.encode()


# Failures inside the scheduler's side -------------------------------------------------------------


def broken(*_: Any, **__: Any) -> Any:
    raise KeyError("broken")


@pytest.mark.parametrize("part", ["begin", "names_of", "PrefillProgress"])
def test_a_prefill_whose_arrival_fails_is_refused_alone(
    pair: Pair, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(TOKENS, seed=3)
    grant = pair.grant(prompt, TOKENS)
    owner: Any = side(pair.prefill)._forms.first.kvd if part == "begin" else scheduler_side
    monkeypatch.setattr(owner, part, broken)
    request = pair.prefill.add("fails", prompt, asking(grant, TOKENS))
    monkeypatch.undo()
    answer = pair.prefill.run("fails")
    assert answer["error"]["code"] == "engine_failed" and not answer["do_remote_prefill"]
    assert request.num_prompt_tokens == 1
    pair.target.abort(grant.transfer_id)


@pytest.mark.parametrize("part", ["attach", "names_of"])
def test_a_decode_whose_arrival_fails_is_lost_alone(
    pair: Pair, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(TOKENS + TAIL, seed=4)
    params = pair.hand_off("before", prompt, TOKENS)
    owner: Any = side(pair.decode)._forms.first.kvd if part == "attach" else scheduler_side
    monkeypatch.setattr(owner, part, broken)
    pair.decode.add("fails", prompt, params)
    monkeypatch.undo()
    assert pair.decode.run("fails") == FAILED
    if part == "attach":
        pair.target.abort(params["transfer_id"])


@pytest.mark.parametrize("hook", ["count_loadable_tokens", "moves_to_load"])
def test_a_load_that_cannot_be_planned_fails_its_request_alone(
    pair: Pair, hook: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(TOKENS + TAIL, seed=5)
    params = pair.hand_off("before", prompt, TOKENS)
    pair.decode.add("fails", prompt, params)
    owner: Any = side(pair.decode) if hook == "count_loadable_tokens" else scheduler_side
    monkeypatch.setattr(owner, hook, broken)
    assert pair.decode.run("fails") == FAILED
    monkeypatch.undo()


def test_a_step_that_cannot_be_planned_fails_its_prefill_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {name: prompt_of(TOKENS + TAIL, seed) for name, seed in (("bad", 6), ("good", 7))}
    grants = {name: pair.grant(prompt, TOKENS) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        pair.prefill.add(name, prompt, asking(grants[name], TOKENS))
    state: Any = side(pair.prefill)._requests["bad"]
    monkeypatch.setattr(state.progress, "step", broken)
    assert pair.prefill.run("good")["do_remote_prefill"]
    assert pair.prefill.run("bad")["error"]["code"] == "engine_failed"
    assert pair.target.status(grants["good"].transfer_id, wait_s=10).state == "committed"
    pair.decode.add("good", prompts["good"], pair.prefill.answers["good"])
    pair.decode.run("good")
    assert pair.decode.resumed["good"] == pair.prefill.left["good"]
    pair.target.abort(grants["bad"].transfer_id)


@pytest.mark.parametrize("end", ["commit", "abort"])
def test_a_lease_that_cannot_be_ended_fails_its_prefill_alone(
    pair: Pair, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(TOKENS, seed=8)
    grant = pair.grant(prompt, TOKENS)
    pair.prefill.add("fails", prompt, asking(grant, TOKENS))
    state: Any = side(pair.prefill)._requests["fails"]
    lease = state.lease
    monkeypatch.setattr(lease, end, broken)
    if end == "commit":
        assert pair.prefill.run("fails")["error"]["code"] == "engine_failed"
    else:
        pair.prefill.step()
        pair.prefill.abort("fails")
        pair.prefill.step()
    monkeypatch.undo()
    lease.abort("the test has ended")
    pair.target.abort(grant.transfer_id)


# Failures inside a worker -------------------------------------------------------------------------


def test_a_layer_that_cannot_be_saved_fails_its_prefill_alone(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was not copied is not ready, so the kvd refuses the commit."""
    prompt = prompt_of(TOKENS, seed=9)
    grant = pair.grant(prompt, TOKENS)
    worker = pair.prefill.worker
    layer = pair.prefill.layout.groups[0].layers[0][0]
    copy = worker._copies[layer]
    monkeypatch.setattr(copy, "_blocks", copy._blocks[:, :-1])  # of another size
    pair.prefill.add("fails", prompt, asking(grant, TOKENS))
    assert pair.prefill.run("fails")["error"]["code"] == "transfer_lost"
    monkeypatch.undo()
    pair.target.abort(grant.transfer_id)


@pytest.mark.parametrize("part", ["join_write", "flush"])
def test_a_kvd_client_that_fails_in_a_worker_fails_its_prefill_alone(
    pair: Pair, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(TOKENS, seed=10)
    grant = pair.grant(prompt, TOKENS)
    monkeypatch.setattr(pair.prefill.worker._kvd, part, broken)
    pair.prefill.add("fails", prompt, asking(grant, TOKENS))
    answer = pair.prefill.run("fails")
    if part == "join_write":
        assert answer["error"]["code"] == "transfer_lost"
    monkeypatch.undo()
    pair.target.abort(grant.transfer_id)


@pytest.mark.parametrize("part", ["join_read", "blocks"])
def test_a_load_that_fails_in_a_worker_fails_its_request_alone(
    pair: Pair, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(TOKENS + TAIL, seed=11)
    params = pair.hand_off("before", prompt, TOKENS)
    worker = pair.decode.worker
    if part == "blocks":
        layer = pair.decode.layout.groups[0].layers[0][0]
        copy = worker._copies[layer]
        monkeypatch.setattr(copy, "_blocks", copy._blocks[:, :-1])
    else:
        monkeypatch.setattr(worker._kvd, part, broken)
    pair.decode.add("fails", prompt, params)
    assert pair.decode.run("fails") == FAILED
    monkeypatch.undo()


def test_orders_that_make_no_sense_fail_alone(pair: Pair) -> None:
    """The worker that gets them reports the load as failed, and has no saves."""
    worker: WorkerSide = pair.prefill.worker
    nonsense = (Move(99, 0, BLOCK_TOKENS, (1,)),)
    orders = StepOrders(
        saves=[SaveOrder("nonsense", None, nonsense, False, "native")],
        loads=[LoadOrder("nonsense", None, nonsense, "native")],  # type: ignore[arg-type]
    )
    worker.begin_step(orders)
    worker.save_layer("no such layer")
    worker.start_loads(orders)
    worker.end_step()
    worker._threads.submit(lambda: None).result(10)  # the load was submitted before
    results = worker.take_results({"nonsense"})
    assert results.loaded == results.failed == {"nonsense"}
