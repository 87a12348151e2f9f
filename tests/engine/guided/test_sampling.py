"""An engine that follows grammars: alone, in any batch, and from resumed state."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from prfaas.engine.api import EngineJob, Export, Finished, Resume, Sampling, TokenMatcher
from prfaas.engine.checkpoint.tokenizer import VOCAB_SIZE
from prfaas.engine.guided.compiler import CompiledGrammar
from prfaas.engine.hf.logits import banned_tokens
from prfaas.engine.hf.sampling import Sampler
from prfaas.engine.memory import MemorySegments
from prfaas.errors import InputError
from tests.engine.emulated.builders import emulated
from tests.engine.guided.test_compiler import PADDED, allowed, compiled
from tests.engine.hf import models
from tests.engine.watching import Watched

CPU = torch.device("cpu")


def grammar() -> CompiledGrammar:
    return compiled("regex", "[ab]{4,8}c")


def test_a_resumed_answer_follows_the_same_grammar_in_any_batch() -> None:
    """The grammar covers what is generated, not the prompt."""
    arch = "qwen3"
    engine, prompt = models.engine(arch), models.prompt(arch, 70)
    sampling = Sampling(40, 1.0, seed=5, grammar=grammar())
    state = MemorySegments(engine.spec)
    first = EngineJob("p", prompt[:69], Sampling(max_tokens=0), export=Export(state, 69))
    assert Watched(engine, first).result()[-1] == Finished("length")
    jobs = [
        EngineJob("alone", prompt, sampling),
        EngineJob("resumed", prompt, sampling, Resume(69, state)),
        EngineJob("other", prompt, replace(sampling, seed=6)),
        EngineJob("free", prompt, Sampling(12, ignore_eos=True)),
    ]
    alone, resumed, other, free = [Watched(engine, job) for job in jobs]
    assert alone.tokens == resumed.tokens and len(free.tokens) == 12
    for answer in (alone, other):
        *text, end = answer.tokens
        assert re.fullmatch("[ab]{4,8}c", bytes(text).decode())
        assert end in engine.limits.eos_token_ids and answer.result()[-1] == Finished("stop")


def test_rows_of_the_logits_that_are_not_tokens_are_banned() -> None:
    matcher: TokenMatcher = grammar().matcher()
    bits = matcher.allowed_bits()
    assert bits is not None
    for rows in (VOCAB_SIZE - 4, VOCAB_SIZE, PADDED, PADDED + 100):
        banned = banned_tokens(bits, rows, CPU)
        assert banned.dtype == torch.bool and len(banned) == rows
        assert set((~banned).nonzero().flatten().tolist()) == {ord("a"), ord("b")}


def test_the_sampler_chooses_the_best_token_that_is_allowed() -> None:
    logits = torch.arange(PADDED, dtype=torch.float32)
    sampler = Sampler(Sampling(grammar=compiled("choice", '["ad", "bc"]')), CPU)
    assert not sampler.is_plain_greedy
    assert [sampler.pick(logits) for _ in range(2)] == list(b"bc")
    assert sampler.pick(logits) == max(models.loaded("qwen3").eos_token_ids)
    assert sampler.pick(logits) == PADDED - 1  # after the end every token is allowed


def test_an_engine_without_logits_refuses_a_grammar_by_its_field() -> None:
    engine = emulated()
    try:
        with pytest.raises(InputError) as caught:
            engine.submit(EngineJob("g", [1], Sampling(grammar=grammar())), lambda _: None)
        assert caught.value.where == "field"
    finally:
        engine.close()


def test_matchers_start_at_the_beginning() -> None:
    shared = grammar()
    shared.matcher().consume(ord("a"))
    assert allowed(shared.matcher()) == {ord("a"), ord("b")}
