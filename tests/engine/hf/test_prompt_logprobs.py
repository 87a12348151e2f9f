"""Log-probabilities of a prompt's tokens, computed in chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prfaas.engine.api import (
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROBS,
    EngineJob,
    EngineLimits,
    Export,
    Prefilled,
    PromptLogprobs,
    Resume,
    Sampling,
    check_job,
)
from prfaas.engine.hf import prompt_logprobs
from prfaas.engine.hf.prompt_logprobs import PromptLogprobsCollector, chunk_limit
from prfaas.engine.memory import MemorySegments
from prfaas.errors import InputError
from tests.engine.hf import models
from tests.engine.watching import Watched

TOLERANCE = 1e-4  # float32, in other chunks


def computed(arch: str, prompt: list[int], alternatives: int, chunk: int = 64) -> Prefilled:
    engine = models.engine(arch, chunk)
    job = EngineJob("job", prompt, Sampling(0), prompt_logprobs=alternatives)
    (prefilled, *_) = Watched(engine, job).result()
    assert isinstance(prefilled, Prefilled) and prefilled.prompt_logprobs is not None
    return prefilled


@pytest.mark.parametrize("arch", models.archs(("qwen3", "kimi-linear", "mimo"), "qwen3"))
def test_they_are_those_of_the_uncut_prompt(arch: str) -> None:
    prompt = models.prompt(arch, 150)
    with torch.inference_mode():
        logits = models.loaded(arch).model(torch.tensor([prompt])).logits[0, :-1].float()
    logprobs = torch.log_softmax(logits, dim=-1)
    wanted = logprobs.gather(-1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()
    prefilled = computed(arch, prompt, 3)
    found = prefilled.prompt_logprobs
    assert found is not None and prefilled.cut_tokens == (64, 128, 150)
    assert np.abs(found.chosen - wanted).max() < TOLERANCE
    assert np.abs(found.top - torch.topk(logprobs, 3).values.numpy()).max() < TOLERANCE
    assert np.array_equal(found.top_ids[:, 0], logprobs.argmax(-1).numpy())
    best = found.top_ids[:, 0] == np.array(prompt[1:])
    assert np.array_equal(found.ranks == 1, best) and found.ranks.min() >= 1


def test_the_logits_of_a_chunk_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chunk_limit(1 << 18) == 128 and chunk_limit(1 << 30) == 1
    prompt, vocab = models.prompt("qwen3", 40), models.loaded("qwen3").vocab_size
    whole = computed("qwen3", prompt, 0)
    monkeypatch.setattr(prompt_logprobs, "MAX_LOGITS", 16 * vocab)
    parts = computed("qwen3", prompt, 0)
    assert whole.cut_tokens == (40,) and parts.cut_tokens == (16, 32, 40)
    assert whole.prompt_logprobs is not None and parts.prompt_logprobs is not None
    apart = np.abs(whole.prompt_logprobs.chosen - parts.prompt_logprobs.chosen).max()
    assert apart < TOLERANCE and parts.prompt_logprobs.top.shape == (39, 0)


def test_a_prompt_of_one_token_has_none() -> None:
    found = computed("qwen3", [5], 2).prompt_logprobs
    assert found is not None
    assert [values.shape for values in found] == [(0,), (0,), (0, 2), (0, 2)]


def test_the_answer_and_the_exported_state_stay_the_same() -> None:
    engine, prompt = models.engine("qwen3"), models.prompt("qwen3", 100)
    sampling = Sampling(4, 1.0, seed=3, ignore_eos=True)
    plain = Watched(engine, EngineJob("plain", prompt, sampling)).tokens
    state = MemorySegments(engine.spec)
    job = EngineJob("asked", prompt, sampling, export=Export(state, 99), prompt_logprobs=1)
    assert Watched(engine, job).tokens == plain
    resumed = EngineJob("resumed", prompt, sampling, resume=Resume(99, state))
    assert Watched(engine, resumed).tokens == plain


def test_ranks_count_equally_likely_tokens() -> None:
    collector = PromptLogprobsCollector([0, 2, 1], 1)
    collector.add(0, torch.tensor([[0.0, 3.0, 3.0, 1.0]]))
    collector.add(1, torch.tensor([[0.0, 3.0, 2.0, 1.0], [9.0, 9.0, 9.0, 9.0]]))
    found: PromptLogprobs = collector.result()
    assert found.ranks.tolist() == [2, 1]
    assert found.top[:, 0].tolist() == pytest.approx(found.chosen.tolist())


def test_what_cannot_be_computed_is_refused_by_its_name() -> None:
    engine = models.engine("qwen3")
    limits = EngineLimits(1 << 22, engine.limits.vocab_size, 1, 1)
    state = MemorySegments(engine.spec)
    for job in (
        EngineJob("many", [1, 2], prompt_logprobs=MAX_LOGPROBS + 1),
        EngineJob("resumed", [1, 2, 3], resume=Resume(1, state), prompt_logprobs=1),
        EngineJob("long", np.ones(MAX_PROMPT_LOGPROBS // 2 + 1, int), prompt_logprobs=1),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match="prompt_logprobs"):
            check_job(job, engine.spec, limits)
    without = EngineLimits(1 << 22, engine.limits.vocab_size, 1, 1, has_logits=False)
    with pytest.raises(InputError, match="prompt_logprobs.*logits|logits"):
        check_job(EngineJob("made up", [1, 2], prompt_logprobs=0), engine.spec, without)
