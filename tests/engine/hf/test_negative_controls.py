"""State that is not quite right must show: in the logits and the tokens, or by being refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from prfaas.engine.api import EngineJob, Export, Resume, Sampling
from prfaas.engine.memory import MemorySegments
from prfaas.errors import EngineError
from prfaas.studies.token_identical import GeneratedTokens, compare
from prfaas_lab.testing.engine_runs import run
from tests.engine.hf import models

Dump = dict[str, bytes]
LENGTH, HANDOFF = 150, 149


def state_of(arch: str) -> Dump:
    prompt = models.prompt(arch, LENGTH)
    sink = MemorySegments(models.loaded(arch).spec)
    export = Export(sink, HANDOFF)
    run(
        models.engine(arch),
        EngineJob("prefill", prompt[:HANDOFF], Sampling(max_tokens=0), export=export),
    )
    return sink.dump()


def resumed(arch: str, dump: Dump) -> GeneratedTokens:
    source = MemorySegments.load(models.loaded(arch).spec, dump)
    sampling = Sampling(max_tokens=16, ignore_eos=True, want_logits=True)
    job = EngineJob("decode", models.prompt(arch, LENGTH), sampling, resume=Resume(HANDOFF, source))
    outcome = run(models.engine(arch), job)
    return GeneratedTokens(outcome.tokens, outcome.logits)


def flip_an_exponent(dump: Dump) -> Dump:
    """One byte of one recurrent state: the highest of its largest element."""
    name = next(name for name in dump if name.startswith("linear"))
    data = bytearray(dump[name])
    state = np.frombuffer(data, dtype=np.float32)[: 4 * 16 * 16]
    data[4 * int(np.abs(state).argmax()) + 3] ^= 0x40
    return {**dump, name: bytes(data)}


def forget_window_tokens(dump: Dump) -> Dump:
    """The four newest tokens of every window."""
    lost = {}
    for name, data in dump.items():
        if name.startswith("window"):
            start, stop = map(int, name.rsplit("/", 1)[1].split("-"))
            per_token = len(data) // (stop - start)
            lost[name] = data[: -4 * per_token] + bytes(4 * per_token)
    return {**dump, **lost}


@pytest.mark.parametrize(
    ("arch", "harm"),
    [
        ("kimi-linear", flip_an_exponent),
        ("qwen3-next", flip_an_exponent),
        ("mimo", forget_window_tokens),
        ("gpt-oss", forget_window_tokens),
    ],
)
def test_harmed_state_changes_logits_and_tokens(arch: str, harm: Callable[[Dump], Dump]) -> None:
    sound = state_of(arch)
    expected = resumed(arch, sound)
    seen = compare(expected, resumed(arch, harm(sound)))
    assert seen.first_difference is not None
    assert not seen.identical


@pytest.mark.parametrize("arch", ("kimi-linear", "qwen3-next"))
def test_a_linear_state_one_token_late_changes_tokens(arch: str) -> None:
    """Everything else is there; only the states have seen one token too many."""
    sound = state_of(arch)
    prompt = models.prompt(arch, LENGTH)
    sink = MemorySegments(models.loaded(arch).spec)
    run(models.engine(arch), EngineJob("late", prompt, Sampling(0), export=Export(sink, LENGTH)))
    late = {
        name.replace(f"-{LENGTH}", f"-{HANDOFF}"): data
        for name, data in sink.dump().items()
        if name.startswith("linear")
    }
    seen = compare(resumed(arch, sound), resumed(arch, {**sound, **late}))
    assert not seen.identical


@pytest.mark.parametrize("arch", ("kimi-linear", "mimo"))
def test_a_missing_segment_is_refused(arch: str) -> None:
    sound = state_of(arch)
    for gone in (next(iter(sound)), list(sound)[-1]):
        rest = {name: data for name, data in sound.items() if name != gone}
        with pytest.raises(EngineError, match="is missing"):
            resumed(arch, rest)
    assert (
        resumed(arch, sound).tokens == models.reference(arch, models.prompt(arch, 150), 16).tokens
    )


def test_bytes_of_another_size_are_refused() -> None:
    spec = models.loaded("kimi-linear").spec
    source = MemorySegments.load(spec, state_of("kimi-linear"))

    class Short:
        def views(self, segment: object) -> list[memoryview]:
            return [view[:-4] for view in source.views(segment)]  # type: ignore[arg-type]

    prompt = models.prompt("kimi-linear", LENGTH)
    job = EngineJob("short", prompt, resume=Resume(HANDOFF, Short()))
    with pytest.raises(EngineError, match="bytes of state instead of"):
        run(models.engine("kimi-linear"), job)
