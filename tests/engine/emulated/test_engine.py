from __future__ import annotations

from collections.abc import Iterator

import pytest

from prfaas.engine.api import (
    Engine,
    EngineLimits,
    Export,
    Finished,
    Prefilled,
    Resume,
    Sampling,
    StepTiming,
)
from prfaas.engine.emulated import EmulatedEngine, EmulatedModel, Scales, scaled_spec
from prfaas.engine.memory import MemorySegments
from prfaas.errors import EngineError, InputError
from prfaas.kvspec import Segment
from prfaas_lab.testing import FakeClock
from tests.engine.contract import EngineContract, MakeEngine, exported, greedy, job, prompt
from tests.engine.emulated.builders import LAYERS, PROFILE, SPEC, STEPS, emulated
from tests.engine.watching import Watched
from tests.waiting import wait_until


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    made: list[Engine] = []

    def make(**options: object) -> Engine:
        fields = {"scales": Scales(time=1e-3), **options}
        made.append(emulated(**fields))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for engine in made:
        engine.close()


class TestContract(EngineContract):
    pass


# State is checked ---------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [group.name for group in SPEC.groups])
def test_a_damaged_byte_names_its_segment(make_engine: MakeEngine, group: str) -> None:
    engine = make_engine()
    carried = exported(engine, 200, 150).dump()
    for offset in (0, -1):
        name = next(name for name in carried if name.startswith(f"{group}/"))
        damaged = bytearray(carried[name])
        damaged[offset] ^= 1
        state = MemorySegments.load(engine.spec, {**carried, name: bytes(damaged)})
        broken = Watched(engine, job(200, resume=Resume(150, state)))
        assert isinstance(broken.error, EngineError) and group in str(broken.error)
    assert len(Watched(engine, job(200)).tokens) == 8


def test_state_of_another_prompt_or_length_is_refused(make_engine: MakeEngine) -> None:
    engine = make_engine()
    state = exported(engine, 200, 150, checkpoints=(149,))
    changed = prompt(200)
    changed[0] ^= 1
    # Linear states one token early, passed off as the right ones.
    carried = state.dump()
    early = {name: carried[name.replace("-150", "-149")] for name in carried if "linear0" in name}
    renamed = {**carried, **early}
    for bad in (
        job(200, prompt=changed, resume=Resume(150, state)),
        job(200, resume=Resume(150, MemorySegments.load(engine.spec, renamed))),
    ):
        assert isinstance(Watched(engine, bad).error, EngineError)


# At the profile's pace ----------------------------------------------------------------------------


class Stepped:
    """An engine whose time stands still until moved."""

    def __init__(self, **options: object) -> None:
        self.clock = FakeClock()
        scales = Scales(time=1000.0)  # nothing ends by itself
        self.engine = emulated(clock=self.clock, scales=scales, **options)  # type: ignore[arg-type]

    def move(self, seconds: float) -> None:
        """In seconds of the profile."""
        self.clock.advance(seconds * 1000.0)
        self.engine.cancel("unknown")  # wakes the engine


@pytest.fixture
def stepped() -> Iterator[Stepped]:
    made = Stepped(chunk_tokens=128)
    yield made
    made.engine.close()


def test_layers_become_ready_one_by_one(stepped: Stepped) -> None:
    state = MemorySegments(stepped.engine.spec)
    watched = Watched(
        stepped.engine, job(256, sampling=greedy(0), export=Export(state, 256, skip_tokens={}))
    )
    first_s = float(PROFILE.seconds(128))
    second_s = float(PROFILE.seconds(256)) - first_s
    wait_until(lambda: stepped.engine.stats().prefilling == 1)
    seen: list[list[int]] = []
    for chunk_s in (first_s, second_s):
        for layer in range(LAYERS):
            before = len(state.segments)
            stepped.move(chunk_s / LAYERS * 0.98)
            wait_until(lambda: True)
            assert len(state.segments) == before, "ahead of its time"
            stepped.move(chunk_s / LAYERS * 0.02 + 1e-9)
            # Layers 3 and 7 grow; in the last chunk every layer closes.
            owed = 1 if chunk_s is second_s or layer in (3, 7) else 0
            wait_until(lambda: len(state.segments) == before + owed)  # noqa: B023
            seen.append([segment.layer for segment in state.segments[before:]])
    assert [layers for layers in seen if layers] == [[3], [7], *([n] for n in range(LAYERS))]
    assert watched.result() == [Prefilled(0, 256, SPEC.kv_bytes(256)), Finished("length")]


def test_a_prompt_takes_what_the_profile_says(stepped: Stepped) -> None:
    for new, cached in ((256, 0), (100, 0), (200, 56)):
        state = None
        if cached:
            state = Resume(cached, Known(new + cached))
        watched = Watched(stepped.engine, job(new + cached, sampling=greedy(0), resume=state))
        wait_until(lambda: stepped.engine.stats().prefilling == 1)
        total_s = float(PROFILE.seconds(new, cached))
        stepped.move(total_s * 0.99)
        assert not watched.events
        stepped.move(total_s * 0.01 + 1e-9)
        assert isinstance(watched.result()[0], Prefilled)


class Known:
    """The state of the usual prompt as an engine would have exported it, without computing it."""

    def __init__(self, tokens: int) -> None:
        from prfaas.engine.emulated.content import Content

        self._content = Content(SPEC, prompt(tokens))

    def views(self, segment: Segment) -> list[memoryview]:
        return [memoryview(self._content.of(segment).tobytes())]


def test_late_wake_ups_do_not_add_up(stepped: Stepped) -> None:
    watched = Watched(stepped.engine, job(100, sampling=greedy(30)))
    wait_until(lambda: stepped.engine.stats().prefilling == 1)
    stepped.move(float(PROFILE.seconds(100)) + 1e-9)
    wait_until(lambda: len(watched.events) == 2)  # the first token comes with the prompt
    stepped.move(10.5 * STEPS[0].step_s)
    wait_until(lambda: len(watched.events) == 12)
    stepped.move(0.6 * STEPS[0].step_s)
    wait_until(lambda: len(watched.events) == 13)


def test_a_step_takes_as_long_as_its_batch(stepped: Stepped) -> None:
    both = []
    for seed in (1, 2):
        one = job(100, seed, prompt=prompt(100), resume=Resume(99, Known(100)), sampling=greedy(5))
        both.append(Watched(stepped.engine, one))
        wait_until(lambda: stepped.engine.stats().running == 1)
    # The second one joins at the next step. A hand-off's last token rides along with a step.
    stepped.move(STEPS[0].step_s + 1e-9)
    wait_until(lambda: stepped.engine.stats().running == 2)
    two_s = STEPS[0].step_s + (STEPS[1].step_s - STEPS[0].step_s) / 7
    before = [len(one.events) for one in both]
    stepped.move(two_s * 0.99)
    assert [len(one.events) for one in both] == before
    stepped.move(two_s * 0.02)
    wait_until(lambda: [len(one.events) for one in both] > before)
    assert both[0].events[0] == Prefilled(99, 1, 0)


def test_a_running_sequence_waits_for_one_chunk_at_most(stepped: Stepped) -> None:
    running = Watched(stepped.engine, job(64, 1, sampling=greedy(9)))
    wait_until(lambda: stepped.engine.stats().prefilling == 1)
    long = Watched(stepped.engine, job(1024, 2, sampling=greedy(0)))
    stepped.move(float(PROFILE.seconds(64)) + 1e-9)
    wait_until(lambda: len(running.events) == 2)
    # Then by turns: a step, a chunk of the long one, a step, ...
    stepped.move(STEPS[0].step_s + 1e-9)
    wait_until(lambda: len(running.events) == 3)
    stepped.move(float(PROFILE.seconds(128)) + STEPS[0].step_s + 1e-9)
    wait_until(lambda: len(running.events) == 4)
    assert not long.events


def test_a_cancelled_prefill_frees_the_instance(stepped: Stepped) -> None:
    cancelled = Watched(stepped.engine, job(1024, 1))
    wait_until(lambda: stepped.engine.stats().prefilling == 1)
    stepped.engine.cancel("job-1024-1")
    assert cancelled.result() == [Finished("cancelled")]
    following = Watched(stepped.engine, job(64, 2, sampling=greedy(1)))
    wait_until(lambda: stepped.engine.stats().prefilling == 1)
    stepped.move(float(PROFILE.seconds(64)) + 1e-9)
    assert following.result()[-1] == Finished("length")


# Scales and limits --------------------------------------------------------------------------------


def test_fewer_bytes_travel_and_are_still_checked(make_engine: MakeEngine) -> None:
    for scale in (0.5, 1e-6):
        engine = make_engine(scales=Scales(time=1e-3, bytes=scale))
        assert engine.spec == scaled_spec(SPEC, scale)
        state = exported(engine, 200, 150)
        assert state.nbytes == engine.spec.kv_bytes(150) < SPEC.kv_bytes(150)
        assert len(Watched(engine, job(200, resume=Resume(150, state))).tokens) == 8
    assert make_engine().compat.differences(engine.compat) != ()
    assert make_engine().compat == make_engine().compat


def test_an_instance_without_decode_steps_only_prefills(make_engine: MakeEngine) -> None:
    limits = EngineLimits(1000, 256, max_running=0, max_waiting=4)
    engine = EmulatedEngine(
        EmulatedModel("m", SPEC, PROFILE, ()),
        limits=limits,
        block_tokens=64,
        scales=Scales(time=1e-3),
    )
    try:
        assert len(Watched(engine, job(sampling=greedy(1))).tokens) == 1
        with pytest.raises(InputError, match="only prefills"):
            Watched(engine, job(sampling=Sampling(max_tokens=2)))
        state = exported(engine, 200, 199)
        resumed = Watched(engine, job(200, sampling=greedy(1), resume=Resume(199, state)))
        assert len(resumed.tokens) == 1
    finally:
        engine.close()
    with pytest.raises(InputError, match="decode steps of up to 8"):
        make_engine(max_running=9)


def test_steps_are_counted_with_the_time_that_they_take_by_the_profile() -> None:
    engine = emulated(scales=Scales(time=1e-3), chunk_tokens=128)
    try:
        assert len(Watched(engine, job(256, sampling=greedy(3))).tokens) == 3
        timing = engine.stats().timing
    finally:
        engine.close()
    assert timing is not None and timing.steps == 2 + 2  # the first token needs no decode step
    wanted_s = float(PROFILE.seconds(256)) + 2 * STEPS[0].step_s
    assert timing.wanted_s == pytest.approx(wanted_s * 1e-3)
    assert timing.late_s >= 0.0


def test_a_step_that_ends_after_its_time_is_late(stepped: Stepped) -> None:
    watched = Watched(stepped.engine, job(64, sampling=greedy(0)))
    wait_until(lambda: stepped.engine.stats().prefilling == 1)
    stepped.move(float(PROFILE.seconds(64)) + 0.25)
    assert watched.result()[-1] == Finished("length")
    timing = stepped.engine.stats().timing
    assert timing is not None
    assert timing.wanted_s == pytest.approx(float(PROFILE.seconds(64)) * 1000.0)
    assert timing.late_s == pytest.approx(0.25 * 1000.0)


def test_a_step_is_never_early() -> None:
    assert StepTiming(1, 1.0, 0.5).plus_step(2.0, -0.25) == StepTiming(2, 3.0, 0.5)
