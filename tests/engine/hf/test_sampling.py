"""Sampling: the set that is drawn from, seeds that hold in any company, stopping."""

from __future__ import annotations

import torch

from prfaas.engine.api import EngineJob, Finished, Sampling
from prfaas.engine.hf.sampling import Sampler
from prfaas.engine.runner import RunningJob, run
from tests.engine.hf import models

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.4]))
CPU = torch.device("cpu")


def drawn(sampling: Sampling, count: int = 300) -> set[int]:
    sampler = Sampler(sampling, CPU)
    return {sampler.pick(LOGITS) for _ in range(count)}


def test_greedy_is_the_best() -> None:
    assert drawn(Sampling(temperature=0.0)) == {1}


def test_top_p_is_the_smallest_set_that_makes_it_up() -> None:
    assert drawn(Sampling(temperature=1.0, seed=1)) == {0, 1, 2}
    assert drawn(Sampling(temperature=1.0, top_p=0.85, seed=1)) == {1, 2}
    assert drawn(Sampling(temperature=1.0, top_p=0.45, seed=1)) == {1}


def test_frequencies_follow_the_temperature() -> None:
    sampler = Sampler(Sampling(temperature=1.0, seed=0), CPU)
    picks = [sampler.pick(LOGITS) for _ in range(4000)]
    assert abs(picks.count(1) / 4000 - 0.5) < 0.05
    cold = Sampler(Sampling(temperature=0.1, seed=0), CPU)
    assert [cold.pick(LOGITS) for _ in range(200)].count(0) == 0


def test_a_seed_holds_in_any_company() -> None:
    engine = models.engine("qwen3")
    sampling = Sampling(max_tokens=12, temperature=1.0, seed=7, ignore_eos=True)
    prompt = models.prompt("qwen3", 20)
    alone = run(engine, EngineJob("alone", prompt, sampling)).tokens
    others = [
        RunningJob(
            engine, EngineJob(f"{n}", models.prompt("qwen3", 10 + n), Sampling(12, 1.0, seed=n))
        )
        for n in range(3)
    ]
    assert run(engine, EngineJob("again", prompt, sampling)).tokens == alone
    for other in others:
        other.result()


def test_stop_tokens_end_the_sequence_and_are_given() -> None:
    engine = models.engine("qwen3")
    prompt = models.prompt("qwen3", 20)
    free = run(engine, EngineJob("free", prompt, Sampling(max_tokens=12, ignore_eos=True))).tokens
    stop = free[5]
    outcome = run(
        engine,
        EngineJob("stop", prompt, Sampling(12, ignore_eos=True, stop_token_ids=frozenset({stop}))),
    )
    assert outcome.tokens == free[: free.index(stop) + 1]
    assert outcome.finished == Finished("stop")
