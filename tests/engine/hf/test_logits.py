"""Every change to a row of logits against a plain reference in numpy, and the order of changes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.engine.api import Sampling
from prfaas.engine.hf import logits as rows
from prfaas.engine.hf.sampling import Sampler
from prfaas.errors import EngineError

CPU = torch.device("cpu")
VOCAB = 40
Row = npt.NDArray[np.float64]


def random_row(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(0, 3, VOCAB).astype(np.float32))


def softmax(row: Row) -> Row:
    shifted: Row = np.exp(row - row.max())
    return shifted / shifted.sum()


def kept(row: torch.Tensor) -> set[int]:
    return set(torch.nonzero(row > -math.inf).flatten().tolist())


def ids(*tokens: int) -> torch.Tensor:
    return torch.tensor(tokens, dtype=torch.int64)


def test_allowed_and_banned_tokens() -> None:
    row = random_row(0)
    before = row.clone()
    rows.allow_only(row, ids(3, 7, 20))
    assert kept(row) == {3, 7, 20} and torch.equal(row[[3, 7, 20]], before[[3, 7, 20]])
    rows.ban(row, ids(7))
    assert kept(row) == {3, 20}


def test_the_end_of_a_word_is_banned_after_its_beginning_only() -> None:
    words = [(5,), (1, 2), (1, 2, 3)]
    assert rows.ends_of_words(words, []) == [5]
    assert rows.ends_of_words(words, [1]) == [5, 2]
    assert rows.ends_of_words(words, [9, 1, 2]) == [5, 3]
    assert rows.ends_of_words(words, [1, 2, 9]) == [5]


def test_bias_is_added() -> None:
    row = random_row(1)
    wanted = row.numpy().copy()
    wanted[4] += 2.5
    wanted[0] -= 100
    rows.add_bias(row, *rows.bias_tensors({4: 2.5, 0: -100.0}, CPU))
    np.testing.assert_allclose(row.numpy(), wanted)


@pytest.mark.parametrize("penalty", [0.5, 1.3])
def test_repetition_divides_what_is_positive_and_multiplies_the_rest(penalty: float) -> None:
    row = random_row(2)
    seen = np.arange(VOCAB) % 3 == 0
    before = row.numpy().copy()
    wanted = np.where(seen, np.where(before > 0, before / penalty, before * penalty), before)
    rows.penalise_repetition(row, torch.from_numpy(seen), penalty)
    np.testing.assert_allclose(row.numpy(), wanted, rtol=1e-6)


def test_frequency_counts_occurrences_and_presence_does_not() -> None:
    row = random_row(3)
    counts = np.zeros(VOCAB, dtype=np.float32)
    counts[[1, 2]] = 3, 1
    wanted = row.numpy() - 0.4 * counts - 1.5 * (counts > 0)
    rows.penalise_occurrences(row, torch.from_numpy(counts), frequency=0.4, presence=1.5)
    np.testing.assert_allclose(row.numpy(), wanted, rtol=1e-6)


@given(st.integers(0, 2**32 - 1), st.floats(0.01, 0.99))
@settings(max_examples=30, deadline=None)
def test_sets_that_are_drawn_from(seed: int, part: float) -> None:
    row = random_row(seed)
    chances = softmax(row.double().numpy())
    by_p, by_k, by_min = row.clone(), row.clone(), row.clone()
    rows.keep_top_p(by_p, part)
    best = np.argsort(-chances)
    before = np.cumsum(chances[best]) - chances[best]
    near = set(best[np.abs(before - part) < 1e-5].tolist())  # a float32 sum may differ there
    assert kept(by_p) ^ set(best[before < part].tolist()) <= near
    count = 1 + int(part * VOCAB)
    rows.keep_top_k(by_k, count)
    assert kept(by_k) == set(best[:count].tolist())
    rows.keep_min_p(by_min, part)
    near = set(np.flatnonzero(np.abs(chances - part * chances.max()) < 1e-6).tolist())
    assert kept(by_min) ^ set(np.flatnonzero(chances >= part * chances.max()).tolist()) <= near


def test_top_k_beyond_the_vocabulary_keeps_every_token() -> None:
    row = random_row(4)
    rows.keep_top_k(row, VOCAB + 1)
    assert len(kept(row)) == VOCAB


def test_draws_follow_the_probabilities() -> None:
    row = torch.log(torch.tensor([0.1, 0.0, 0.6, 0.3]))
    generator = torch.Generator().manual_seed(1)
    picks = [int(rows.draw(row, generator)) for _ in range(4000)]
    shares = np.bincount(picks, minlength=4) / 4000
    np.testing.assert_allclose(shares, [0.1, 0.0, 0.6, 0.3], atol=0.03)


def test_logprobs_are_those_of_the_row() -> None:
    row = random_row(5)
    wanted = np.log(softmax(row.double().numpy()))
    found = rows.token_logprobs(row, 17, 3)
    best = np.argsort(-wanted)[:3]
    assert [token for token, _ in found.top] == best.tolist()
    np.testing.assert_allclose([value for _, value in found.top], wanted[best], atol=1e-5)
    assert found.chosen == pytest.approx(wanted[17], abs=1e-5)
    assert rows.token_logprobs(row, 17, 0).top == ()


# The sampler --------------------------------------------------------------------------------------


def chosen(sampling: Sampling, count: int, row: torch.Tensor | None = None, **more: Any) -> Any:
    sampler = Sampler(sampling, CPU, **more)
    return [sampler.pick(random_row(6) if row is None else row) for _ in range(count)]


def test_plain_greedy_has_no_state() -> None:
    assert Sampler(Sampling(), CPU).is_plain_greedy
    assert Sampler(Sampling(logprobs=2), CPU).is_plain_greedy
    for changed in (
        Sampling(temperature=1.0),
        Sampling(min_tokens=1),
        Sampling(logit_bias={1: 1.0}, logprobs=1),
    ):
        assert not Sampler(changed, CPU).is_plain_greedy


def test_greedy_answers_follow_the_changes() -> None:
    best = torch.argsort(random_row(6), descending=True).tolist()
    first, second, third = best[:3]
    assert chosen(Sampling(), 2) == [first] * 2
    assert chosen(Sampling(allowed_token_ids=frozenset({third, second})), 2) == [second] * 2
    assert chosen(Sampling(logit_bias={third: 100.0}), 2) == [third] * 2
    assert chosen(Sampling(bad_words_token_ids=((first, first),)), 4) == [first, second] * 2
    ends = frozenset({first})
    assert chosen(Sampling(min_tokens=2), 3, eos_token_ids=ends) == [second, second, first]
    assert chosen(Sampling(min_tokens=1, stop_token_ids=ends), 2) == [second, first]


def test_penalties_know_the_prompt_and_the_answer() -> None:
    row = torch.tensor([3.0, 2.0, 1.0, -5.0])
    assert chosen(Sampling(repetition_penalty=2.0), 1, row, prompt=[0]) == [1]
    assert chosen(Sampling(repetition_penalty=2.0), 3, row) == [0, 1, 0]
    assert chosen(Sampling(presence_penalty=1.5), 3, row, prompt=[0]) == [0, 1, 0]
    assert chosen(Sampling(frequency_penalty=1.2), 4, row) == [0, 1, 0, 2]


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    best = int(random_row(6).argmax())
    assert chosen(Sampling(temperature=50.0, top_k=1), 20) == [best] * 20
    assert chosen(Sampling(temperature=1e-30), 20) == [best] * 20


def test_no_token_left_is_an_error() -> None:
    sampling = Sampling(allowed_token_ids=frozenset({3}), bad_words_token_ids=((3,),))
    for temperature in (0.0, 1.0):
        with pytest.raises(EngineError, match="allowed_token_ids"):
            chosen(replace(sampling, temperature=temperature), 1)


def test_the_models_row_is_not_changed() -> None:
    row = random_row(7)
    before = row.clone()
    sampling = Sampling(temperature=0.7, top_k=3, logit_bias={1: 9.0}, presence_penalty=1.0)
    Sampler(sampling, CPU).pick(row)
    assert torch.equal(row, before)
