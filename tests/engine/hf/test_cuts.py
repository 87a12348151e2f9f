"""A prompt that is cut as a hand-off was cut gives the hand-off's numbers, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas.engine.api import MAX_CUTS, EngineJob, Export, Resume, Sampling
from prfaas.engine.hf import HFEngine
from prfaas.engine.memory import MemorySegments
from prfaas.errors import InputError
from prfaas_lab.testing.engine_runs import JobOutcome, run
from tests.engine.hf import models

GREEDY = Sampling(max_tokens=8, ignore_eos=True, want_logits=True)
LENGTH = 150


def handed_off(
    sender: HFEngine, receiver: HFEngine, prompt: list[int], tokens: int
) -> tuple[JobOutcome, tuple[int, ...]]:
    """The receiver's answer, and where the two have cut the prompt."""
    sink = MemorySegments(sender.spec)
    prefill = EngineJob("p", prompt[:tokens], Sampling(max_tokens=0), export=Export(sink, tokens))
    sent = run(sender, prefill).prefilled
    state = MemorySegments.load(sender.spec, sink.dump())
    answer = run(receiver, EngineJob("d", prompt, GREEDY, resume=Resume(tokens, state)))
    assert sent is not None and answer.prefilled is not None
    return answer, (*sent.cut_tokens, *answer.prefilled.cut_tokens)


@pytest.mark.parametrize("arch", models.archs(models.ALL, "kimi-linear", "mimo"))
def test_equal_cuts_give_equal_bits(arch: str) -> None:
    """The engine that computes the reference has longer chunks than either of the two."""
    prompt = models.prompt(arch, LENGTH)
    sender, receiver = models.engine(arch), models.engine(arch, chunk_tokens=7)
    for handoff, expected in ((128, (64, 128, 133, 140, 147, 150)), (131, (64, 128, 131))):
        answer, cuts = handed_off(sender, receiver, prompt, handoff)
        assert cuts[: len(expected)] == expected and cuts[-1] == LENGTH
        whole = run(sender, EngineJob("r", prompt, GREEDY, cut_tokens=cuts[:-1]))
        assert whole.prefilled is not None and whole.prefilled.cut_tokens == cuts
        assert answer.logits is not None and whole.logits is not None
        assert np.array_equal(answer.logits, whole.logits), handoff
        assert answer.tokens == whole.tokens


def test_other_cuts_give_other_bits() -> None:
    """Otherwise the test above would prove nothing."""
    prompt = models.prompt("kimi-linear", LENGTH)
    engine = models.engine("kimi-linear")
    answer, _ = handed_off(engine, models.engine("kimi-linear", chunk_tokens=7), prompt, 131)
    uncut = run(engine, EngineJob("r", prompt, GREEDY))
    assert answer.logits is not None and uncut.logits is not None
    assert not np.array_equal(answer.logits, uncut.logits)


@pytest.mark.parametrize(
    "cuts", [(0,), (LENGTH,), (5, 5), (9, 5), (-1,), tuple(range(1, MAX_CUTS + 2))]
)
def test_a_prompt_cannot_be_cut_there(cuts: tuple[int, ...]) -> None:
    prompt = models.prompt("kimi-linear", LENGTH)
    with pytest.raises(InputError, match="^cut_tokens: "):
        run(models.engine("kimi-linear"), EngineJob("r", prompt, GREEDY, cut_tokens=cuts))
