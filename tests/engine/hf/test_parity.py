"""The engine against transformers' own `generate`, token for token (float32, greedy).

Whatever happens in between - chunks, bytes, another process, a cached prefix, company in the batch
- the tokens are those of one undisturbed process.
"""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.engine.api import EngineJob, Export, Resume, Sampling
from prfaas.engine.hf import HFEngine
from prfaas.engine.memory import MemorySegments
from prfaas.kvspec import FullAttention
from prfaas.studies.token_identical import GeneratedTokens, assert_token_identical
from prfaas_lab.testing.engine_runs import JobOutcome, RunningJob, run
from tests.engine.hf import models
from tests.waiting import PATIENCE_S

NEW_TOKENS = 64
LENGTHS = (1, 5, 63, 64, 65, 128, 200)  # blocks and chunks are 64, windows 64 and 128
GREEDY = Sampling(max_tokens=NEW_TOKENS, ignore_eos=True, want_logits=True)
ROOT = Path(__file__).parents[3]


def generation(outcome: JobOutcome) -> GeneratedTokens:
    return GeneratedTokens(outcome.tokens, outcome.logits)


def exported(arch: str, prompt: list[int], tokens: int, **options: int) -> MemorySegments:
    """State after `tokens` tokens, as bytes that have been elsewhere."""
    spec = models.loaded(arch).spec
    sink = MemorySegments(spec)
    job = EngineJob("prefill", prompt[:tokens], Sampling(max_tokens=0), export=Export(sink, tokens))
    outcome = run(models.engine(arch, **options), job)
    assert outcome.tokens == ()
    assert outcome.prefilled is not None
    assert outcome.prefilled.exported_bytes == sink.nbytes == spec.kv_bytes(tokens)
    return MemorySegments.load(spec, sink.dump())


@pytest.mark.parametrize("length", (150, *(pytest.param(n, marks=models.grid) for n in LENGTHS)))
@pytest.mark.parametrize("arch", models.archs(models.ALL, "kimi-linear", "mimo"))
def test_chunked_prefill_and_decode(arch: str, length: int) -> None:
    prompt = models.prompt(arch, length)
    outcome = run(models.engine(arch), EngineJob("whole", prompt, GREEDY))
    assert outcome.tokens == models.reference(arch, prompt, NEW_TOKENS).tokens


@pytest.mark.parametrize(
    "length", (150, *(pytest.param(n, marks=models.grid) for n in LENGTHS[1:]))
)
@pytest.mark.parametrize("arch", models.archs(models.ALL, "kimi-linear", "mimo"))
def test_state_as_bytes_and_back(arch: str, length: int) -> None:
    """From the last boundary, and from the last token but one."""
    prompt = models.prompt(arch, length)
    for handoff in {length - 1, length // 64 * 64} - {0, length}:
        state = exported(arch, prompt, handoff)
        job = EngineJob("decode", prompt, GREEDY, resume=Resume(handoff, state))
        outcome = run(models.engine(arch), job)
        assert outcome.tokens == models.reference(arch, prompt, NEW_TOKENS).tokens, handoff
        assert outcome.prefilled is not None
        assert outcome.prefilled.resumed_tokens == handoff


# The ordinary tests hand over between processes in tests/node.
@pytest.mark.parametrize(
    "arch",
    [pytest.param("kimi-linear", marks=pytest.mark.grid), *models.archs(models.PAPER[1:])],
)
def test_prefill_here_decode_in_another_process(arch: str, tmp_path: Path) -> None:
    """The other process loads the checkpoint itself and sees nothing but bytes."""
    cases = []
    for length in (5, 64, 65, 150):
        prompt = models.prompt(arch, length, seed=1)
        state = exported(arch, prompt, length - 1)
        cases.append((prompt, length - 1, state.dump()))
    (tmp_path / "cases").write_bytes(pickle.dumps(cases))
    script = [sys.executable, "-m", "tests.engine.hf.decode_elsewhere"]
    arguments = [str(models.checkpoint(arch)), str(tmp_path / "cases"), str(tmp_path / "tokens")]
    subprocess.run([*script, *arguments], check=True, cwd=ROOT, timeout=4 * PATIENCE_S)
    answers = pickle.loads((tmp_path / "tokens").read_bytes())
    for (prompt, _, _), tokens in zip(cases, answers, strict=True):
        assert tokens == models.reference(arch, prompt, NEW_TOKENS).tokens, len(prompt)


@pytest.mark.parametrize("chunk_tokens", (64, 7))
@pytest.mark.parametrize("arch", models.archs(models.ALL, "kimi-linear", "mimo"))
def test_prefill_from_a_cached_prefix(arch: str, chunk_tokens: int) -> None:
    """The prefix comes from one prefill, the rest is computed on top of it, in other chunks, and
    exported again: the state at the end is the same hand-off."""
    spec = models.loaded(arch).spec
    prompt = models.prompt(arch, 150, seed=2)
    prefix, handoff = 74, 149
    cached = exported(arch, prompt, prefix)
    sink = MemorySegments(spec)
    skip = {group.name: prefix for group in spec.groups if isinstance(group, FullAttention)}
    job = EngineJob(
        "prefill",
        prompt[:-1],
        Sampling(max_tokens=0),
        resume=Resume(prefix, cached),
        export=Export(sink, handoff, skip_tokens=skip),
    )
    outcome = run(models.engine(arch, chunk_tokens=chunk_tokens), job)
    assert outcome.prefilled is not None
    assert outcome.prefilled.exported_bytes == spec.kv_bytes(handoff, prefix)
    # The receiver has the first tokens already, the rest has just come.
    both = MemorySegments.load(spec, {**cached.dump(), **sink.dump()})
    resumed = EngineJob("decode", prompt, GREEDY, resume=Resume(handoff, both))
    tokens = run(models.engine(arch), resumed).tokens
    assert tokens == models.reference(arch, prompt, NEW_TOKENS).tokens


@pytest.mark.parametrize("seed", (0, *(pytest.param(n, marks=models.grid) for n in range(1, 5))))
@pytest.mark.parametrize("arch", models.archs(models.PAPER, "kimi-linear", "mimo"))
def test_in_a_batch_that_others_join_and_leave(arch: str, seed: int) -> None:
    """Token-identical to one process, for requests of many lengths on few rows."""
    shuffled = random.Random(seed)
    engine = HFEngine(models.loaded(arch), chunk_tokens=64, max_running=4)
    try:
        running = []
        for number in range(8):
            prompt = models.prompt(arch, shuffled.randint(1, 200), seed=100 * seed + number)
            count = shuffled.randint(5, 40)
            job = EngineJob(f"{number}", prompt, Sampling(count, ignore_eos=True, want_logits=True))
            running.append((prompt, count, RunningJob(engine, job)))
        for prompt, count, job in running:
            outcome = job.result()
            assert len(outcome.tokens) == count
            expected = models.reference(arch, prompt, count)
            seen = assert_token_identical(expected, generation(outcome), f"{len(prompt)} tokens")
            if seen.first_difference is not None:
                print(f"{arch}, seed {seed}: {seen}")  # noqa: T201 - every difference is reported
        assert engine.stats().running == 0
    finally:
        engine.close()
