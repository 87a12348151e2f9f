"""Sampling: the set that is drawn from, seeds that hold in any company, stopping."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.api import EngineJob, Export, Finished, Resume, Sampling, Token
from prfaas.engine.hf.sampling import Sampler
from prfaas.engine.memory import MemorySegments
from prfaas.errors import EngineError
from prfaas_lab.testing.engine_runs import run
from tests.engine.hf import models
from tests.engine.watching import Watched

LOGITS = torch.log(torch.tensor([0.1, 0.5, 0.4]))
CPU = torch.device("cpu")
OTHERS = (
    Sampling(8, ignore_eos=True),
    Sampling(8, 1.0, seed=3, ignore_eos=True),
    Sampling(8, 0.8, top_k=20, min_p=0.01, top_p=0.9, ignore_eos=True),
    Sampling(8, 1.2, repetition_penalty=1.3, presence_penalty=0.5, logprobs=3, ignore_eos=True),
    Sampling(8, 1.0, logit_bias={7: 3.0}, bad_words_token_ids=((7, 7),), min_tokens=4),
)


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


@given(st.lists(st.sampled_from(OTHERS), max_size=4), st.integers(0, 2**31), st.data())
@settings(max_examples=6, deadline=None)
def test_a_seeded_answer_does_not_depend_on_the_batch(
    others: list[Sampling], seed: int, data: st.DataObject
) -> None:
    engine, prompt = models.engine("qwen3"), models.prompt("qwen3", 20)
    mine = replace(data.draw(st.sampled_from(OTHERS)), seed=seed)
    alone = Watched(engine, EngineJob("alone", prompt, mine)).tokens
    batch = [
        Watched(engine, EngineJob(f"{n}", models.prompt("qwen3", 10 + n), other))
        for n, other in enumerate(others)
    ]
    assert Watched(engine, EngineJob("again", prompt, mine)).tokens == alone
    for one in batch:
        one.result()


def test_logprobs_of_a_resumed_prompt_are_those_of_one_engine() -> None:
    """And those of the logits, whatever the request does to them."""
    arch = "kimi-linear"
    engine, prompt = models.engine(arch), models.prompt(arch, 150)
    sampling = Sampling(6, ignore_eos=True, logprobs=4, want_logits=True, logit_bias={3: 100.0})
    state = MemorySegments(engine.spec)
    first = EngineJob("p", prompt[:149], Sampling(max_tokens=0), export=Export(state, 149))
    assert Watched(engine, first).result()[-1] == Finished("length")
    answers = [
        [
            event
            for event in Watched(engine, EngineJob("d", prompt, sampling, resume)).result()
            if isinstance(event, Token)
        ]
        for resume in (None, Resume(149, state))
    ]
    assert [[token.id for token in answer] for answer in answers] == [[3] * 6] * 2
    for alone, resumed in zip(*answers, strict=True):
        assert alone.logits is not None and alone.logprobs is not None
        assert resumed.logprobs is not None and len(alone.logprobs.top) == 4
        whole = torch.log_softmax(torch.from_numpy(alone.logits), dim=-1)
        assert alone.logprobs.chosen == pytest.approx(float(whole[3]), abs=1e-5)
        assert resumed.logprobs.chosen == pytest.approx(alone.logprobs.chosen, abs=1e-3)
        for (token, one), (same, other) in zip(
            alone.logprobs.top, resumed.logprobs.top, strict=True
        ):
            assert token == same and one == pytest.approx(other, abs=1e-3)


def test_a_request_that_allows_no_token_fails_alone() -> None:
    engine, prompt = models.engine("qwen3"), models.prompt("qwen3", 20)
    only = frozenset({5})
    never = Sampling(12, allowed_token_ids=only, bad_words_token_ids=((5,),))
    later = Sampling(12, allowed_token_ids=only, bad_words_token_ids=((5, 5, 5),))
    other = Watched(engine, EngineJob("other", prompt, Sampling(12, ignore_eos=True)))
    for sampling, tokens in ((never, []), (later, [5, 5])):
        failed = Watched(engine, EngineJob("failed", prompt, sampling))
        assert isinstance(failed.error, EngineError) and failed.tokens == tokens
    assert len(other.tokens) == 12


def test_a_stop_token_is_marked_and_waits_for_min_tokens() -> None:
    engine, prompt = models.engine("qwen3"), models.prompt("qwen3", 20)
    free = run(engine, EngineJob("free", prompt, Sampling(max_tokens=1, ignore_eos=True))).tokens
    stop = frozenset(free)
    at_once = Watched(engine, EngineJob("1", prompt, Sampling(8, stop_token_ids=stop)))
    assert [event for event in at_once.result() if isinstance(event, Token)] == [
        Token(free[0], is_stop=True)
    ]
    sampling = Sampling(8, stop_token_ids=stop, min_tokens=5, ignore_eos=True)
    tokens = Watched(engine, EngineJob("2", prompt, sampling)).tokens
    assert len(tokens) >= 5 and free[0] not in tokens[:5]


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
