"""What every engine must do, whatever computes inside. Subclass `EngineContract` in a test file
and give it a `make_engine` fixture.

`make_engine(**overrides)` makes an engine of one and the same model, closed when the test ends;
overrides are `chunk_tokens`, `max_running` and `max_waiting`. The model takes prompts of 400 token
ids below 256, and a greedy answer of 40 tokens holds at least three different ones.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import pytest

from prfaas.engine.api import (
    Engine,
    EngineJob,
    EngineStats,
    Event,
    Export,
    Finished,
    JobFailed,
    KeepAnswer,
    Prefilled,
    Resume,
    Sampling,
    Token,
)
from prfaas.engine.memory import MemorySegments
from prfaas.errors import EngineError, InputError
from prfaas.kvspec import FullAttention, Segment, handoff_segments
from prfaas.types import NotNow
from tests.engine.watching import BrokenSink, GatedSegments, Watched
from tests.waiting import PATIENCE_S, wait_until

MakeEngine: TypeAlias = Callable[..., Engine]
LENGTHS = (1, 63, 64, 65, 200)
IDLE = EngineStats(waiting=0, prefilling=0, running=0, kv_tokens=0)


def prompt(tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(256), k=tokens)


def greedy(max_tokens: int = 8) -> Sampling:
    return Sampling(max_tokens=max_tokens, ignore_eos=True)


def job(tokens: int = 100, seed: int = 0, **fields: object) -> EngineJob:
    made = EngineJob(f"job-{tokens}-{seed}", prompt(tokens, seed), greedy())
    return replace(made, **fields)  # type: ignore[arg-type]


def exported(
    engine: Engine, tokens: int, at: int, checkpoints: tuple[int, ...] = ()
) -> MemorySegments:
    """The state after `at` tokens of the usual prompt, and at the checkpoints."""
    state = MemorySegments(engine.spec)
    export = Export(state, at, checkpoints)
    done = Watched(engine, job(tokens, sampling=greedy(0), export=export))
    assert done.result()[-1] == Finished("length")
    return state


def refused_as_closing(engine: Engine) -> bool:
    refused = Watched(engine, job(1, sampling=greedy(0))).refused
    return refused is not None and "closing" in refused.reason


def skips(engine: Engine, tokens: int) -> dict[str, int]:
    groups = engine.spec.groups
    return {group.name: tokens for group in groups if isinstance(group, FullAttention)}


class EngineContract:
    # Events ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("tokens", LENGTHS)
    def test_a_job_is_prefilled_answered_and_finished(
        self, make_engine: MakeEngine, tokens: int
    ) -> None:
        engine = make_engine(chunk_tokens=64)
        done = Watched(engine, job(tokens))
        prefilled, *answer, finished = done.result()
        assert prefilled == Prefilled(0, tokens, 0)
        assert all(isinstance(event, Token) for event in answer) and len(answer) == 8
        assert all(0 <= token < engine.limits.vocab_size for token in done.tokens)
        assert finished == Finished("length")
        assert len(done.threads) == 1 and threading.get_ident() not in done.threads
        wait_until(lambda: engine.stats() == IDLE)

    def test_a_job_tells_once_that_it_has_left_the_queue(self, make_engine: MakeEngine) -> None:
        engine = make_engine(max_running=1)
        order: list[str] = []

        def watched(name: str) -> Watched:
            one = replace(job(100, sampling=greedy(2)), id=name)
            one = replace(one, on_begin=lambda: order.append(f"{name} begins"))
            return Watched(engine, one, lambda event: order.append(name))

        for done in [watched("first"), watched("second")]:
            done.result()
        events = 4  # prefilled, two tokens, finished
        first, second = ["first"] * events, ["second"] * events
        assert order == ["first begins", *first, "second begins", *second]

    def test_a_tenant_that_fills_the_engine_leaves_a_slot_to_another(
        self, make_engine: MakeEngine
    ) -> None:
        engine = make_engine(max_running=4)
        all_asked = threading.Event()
        ended: list[str] = []

        def watched(tenant: str, seed: int, tokens: int) -> Watched:
            def on_event(event: Event) -> None:
                if isinstance(event, Token):
                    assert all_asked.wait(PATIENCE_S)
                if isinstance(event, Finished):
                    ended.append(tenant)

            asked = job(30, seed, sampling=greedy(tokens), tenant=tenant)
            return Watched(engine, asked, on_event)

        jobs = [watched("flood", seed, 60) for seed in range(8)]
        jobs += [watched("other", seed, 2) for seed in range(8, 10)]
        all_asked.set()
        for one in jobs:
            one.result()
        assert ended[:2] == ["other", "other"]
        assert len(ended) == 10
        wait_until(lambda: engine.stats() == IDLE)

    def test_an_answer_is_the_prompts_own(self, make_engine: MakeEngine) -> None:
        engine = make_engine(max_running=4)
        jobs = [job(tokens, seed=tokens) for tokens in (30, 80, 150, 200, 31, 81)]
        alone = [Watched(engine, one).tokens for one in jobs]
        together = [Watched(engine, one) for one in jobs]
        assert [watched.tokens for watched in together] == alone
        assert len({tuple(tokens) for tokens in alone}) == len(jobs)

    def test_chunks_do_not_show_in_the_answer(self, make_engine: MakeEngine) -> None:
        answers = [
            Watched(make_engine(chunk_tokens=chunk), job(200)).tokens for chunk in (64, 48, 400)
        ]
        assert answers[0] == answers[1] == answers[2]

    def test_a_job_may_have_smaller_chunks(self, make_engine: MakeEngine) -> None:
        engine = make_engine(chunk_tokens=64)
        (prefilled, *_), small = (
            Watched(engine, job(200, chunk_tokens=chunk)).result() for chunk in (400, 32)
        )
        assert isinstance(prefilled, Prefilled) and isinstance(small[0], Prefilled)
        assert prefilled.cut_tokens == (64, 128, 192, 200)
        assert small[0].cut_tokens == (32, 64, 96, 128, 160, 192, 200)

    def test_prefill_only(self, make_engine: MakeEngine) -> None:
        done = Watched(make_engine(), job(100, sampling=greedy(0)))
        assert done.result() == [Prefilled(0, 100, 0), Finished("length")]

    def test_a_stop_token_ends_it_and_is_the_last(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        free = Watched(engine, job(sampling=greedy(40))).tokens
        stop = free[20]
        stopping = replace(greedy(40), stop_token_ids=frozenset({stop}))
        done = Watched(engine, job(sampling=stopping))
        assert done.tokens == free[: free.index(stop) + 1]
        assert done.result()[-1] == Finished("stop")

    def test_the_same_seed_gives_the_same_tokens(self, make_engine: MakeEngine) -> None:
        engine = make_engine()

        def drawn(seed: int | None) -> list[int]:
            sampling = Sampling(max_tokens=12, temperature=5.0, seed=seed, ignore_eos=True)
            return Watched(engine, job(sampling=sampling)).tokens

        assert drawn(1) == drawn(1)
        assert len({tuple(drawn(seed)) for seed in (1, 2, None, None)}) == 4

    # Kept answers ---------------------------------------------------------------------------------

    @pytest.mark.parametrize(("tokens", "held"), [(100, 64), (64, 0)])
    def test_a_kept_answer_can_be_continued(
        self, make_engine: MakeEngine, tokens: int, held: int
    ) -> None:
        """After a prefix that was exported with the prompt, in a batch from which others leave."""
        engine = make_engine(max_running=4)
        size = engine.compat.block_tokens
        state = MemorySegments(engine.spec)
        export = Export(state, held) if held else None
        ended = job(tokens, sampling=greedy(tokens - 60), export=export, keep=KeepAnswer(held))
        other = Watched(engine, job(31, seed=1))
        done = Watched(engine, ended)
        finished = done.result()[-1]
        assert isinstance(finished, Finished) and finished.answer is not None
        conversation = [*ended.prompt, *done.tokens]
        boundary = (len(conversation) - 1) // size * size
        assert finished.answer.tokens == boundary
        finished.answer.write(state, skips(engine, held))
        asked = EngineJob("next", [*conversation, 7, 8, 9], greedy(6))
        resumed = Watched(engine, replace(asked, resume=Resume(boundary, state)))
        assert resumed.prefilled.resumed_tokens == boundary
        assert resumed.tokens == Watched(engine, replace(asked, id="alone")).tokens
        other.result()

    def test_a_cancelled_answer_is_kept_up_to_where_it_came(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        asked = job(120, sampling=greedy(270), keep=KeepAnswer(64))
        going = Watched(engine, asked)
        wait_until(lambda: len(going.events) > 20)
        engine.cancel(asked.id)
        finished = going.result()[-1]
        assert isinstance(finished, Finished) and finished.answer is not None
        assert finished.answer.tokens % engine.compat.block_tokens == 0
        assert 128 <= finished.answer.tokens < 120 + len(going.tokens)

    def test_no_answer_is_kept_unasked_or_without_a_boundary(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        for one in (
            job(120, sampling=greedy(12)),
            job(100, sampling=greedy(3), keep=KeepAnswer(64)),
            job(100, sampling=greedy(0), keep=KeepAnswer(64)),
        ):
            finished = Watched(engine, one).result()[-1]
            assert isinstance(finished, Finished) and finished.answer is None
        with pytest.raises(InputError, match="held_tokens"):
            Watched(engine, job(100, keep=KeepAnswer(101)))

    # Export ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("at", LENGTHS)
    def test_exported_bytes_are_those_of_the_spec(self, make_engine: MakeEngine, at: int) -> None:
        engine = make_engine(chunk_tokens=64)
        state = MemorySegments(engine.spec)
        done = Watched(engine, job(200, export=Export(state, at)))
        assert done.prefilled.exported_bytes == state.nbytes == engine.spec.kv_bytes(at)
        expected = set(handoff_segments(engine.spec, at, chunk_tokens=64))
        assert set(state.segments) == expected

    def test_everything_is_ready_before_prefilled(self, make_engine: MakeEngine) -> None:
        engine = make_engine(chunk_tokens=64)
        order: list[Segment | Event] = []

        class Ordered(MemorySegments):
            def ready(self, segment: Segment, heads: range | None = None) -> None:
                order.append(segment)
                super().ready(segment, heads)

        state = Ordered(engine.spec)
        Watched(engine, job(200, export=Export(state, 200)), order.append).result()
        kinds = [type(one) for one in order]
        assert kinds == [Segment] * len(state.segments) + [Prefilled] + [Token] * 8 + [Finished]
        # Chunk by chunk, and within a chunk layer by layer.
        chunks = [(segment.stop, segment.layer) for segment in state.segments]
        assert chunks == sorted(chunks)

    def test_what_the_receiver_holds_does_not_travel(self, make_engine: MakeEngine) -> None:
        engine = make_engine(chunk_tokens=64)
        for skip in (64, 100):
            state = MemorySegments(engine.spec)
            export = Export(state, 150, skip_tokens=skips(engine, skip))
            done = Watched(engine, job(200, export=export))
            assert done.prefilled.exported_bytes == state.nbytes
            assert state.nbytes == engine.spec.kv_bytes(150, skip)

    def test_checkpoints_are_written_and_can_be_resumed_from(self, make_engine: MakeEngine) -> None:
        engine = make_engine(chunk_tokens=64)
        state = exported(engine, 200, 199, checkpoints=(64, 100))
        closing = [group for group in engine.spec.groups if not isinstance(group, FullAttention)]
        for length in (64, 100, 199):
            for group in closing:
                layers = [
                    s.layer for s in state.segments if (s.group, s.stop) == (group.name, length)
                ]
                assert layers == list(group.layers)
        expected = Watched(engine, job(200)).tokens
        for length in (64, 100, 199):
            done = Watched(engine, job(200, resume=Resume(length, state)))
            assert done.tokens == expected
            assert done.prefilled == Prefilled(length, 200 - length, 0)

    # Resume ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        "at",
        (1, 64, 199, *(pytest.param(at, marks=pytest.mark.slow) for at in (63, 65, 150))),
    )
    def test_another_engine_goes_on_from_the_bytes(self, make_engine: MakeEngine, at: int) -> None:
        sender, receiver = make_engine(chunk_tokens=64), make_engine(chunk_tokens=48)
        expected = Watched(sender, job(200)).tokens
        carried = exported(sender, 200, at).dump()
        state = MemorySegments.load(receiver.spec, carried)
        assert Watched(receiver, job(200, resume=Resume(at, state))).tokens == expected

    def test_a_resumed_job_exports_the_rest(self, make_engine: MakeEngine) -> None:
        engine = make_engine(chunk_tokens=64)
        first = exported(engine, 200, 128)
        second = MemorySegments(engine.spec)
        export = Export(second, 199, skip_tokens=skips(engine, 128))
        done = Watched(engine, job(200, resume=Resume(128, first), export=export))
        expected = done.tokens
        assert second.nbytes == engine.spec.kv_bytes(199, 128) == done.prefilled.exported_bytes
        # What the receiver held, and what came.
        closed = {s for s in first.segments if not isinstance(engine.spec[s.group], FullAttention)}
        held = {s.name: data for s, data in zip(first.segments, first.dump().values(), strict=True)}
        kept = {name: data for name, data in held.items() if Segment.parse(name) not in closed}
        whole = MemorySegments.load(engine.spec, {**kept, **second.dump()})
        assert Watched(engine, job(200, resume=Resume(199, whole))).tokens == expected

    # Refusals -------------------------------------------------------------------------------------

    def test_bad_jobs_are_refused_at_once(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        state = MemorySegments(engine.spec)
        most = engine.limits.max_tokens
        for bad, message in (
            (job(0), "prompt is empty"),
            (job(sampling=greedy(most)), "more than the model's"),
            (job(prompt=[0, engine.limits.vocab_size]), "token id is outside"),
            (job(prompt=[0, -1]), "token id is outside"),
            (job(sampling=Sampling(temperature=-1.0)), "temperature"),
            (job(sampling=Sampling(top_p=0.0)), "top_p"),
            (job(sampling=Sampling(top_k=-1)), "top_k"),
            (job(sampling=Sampling(min_p=1.5)), "min_p"),
            (job(sampling=Sampling(min_tokens=17)), "min_tokens"),
            (job(sampling=Sampling(presence_penalty=2.5)), "presence_penalty"),
            (job(sampling=Sampling(frequency_penalty=-3.0)), "frequency_penalty"),
            (job(sampling=Sampling(repetition_penalty=0.0)), "repetition_penalty"),
            (job(sampling=Sampling(logit_bias={10**6: 1.0})), "logit_bias"),
            (job(sampling=Sampling(allowed_token_ids=frozenset())), "allowed_token_ids"),
            (job(sampling=Sampling(bad_words_token_ids=((10**6,),))), "bad_words"),
            (job(sampling=Sampling(logprobs=21)), "logprobs"),
            (job(sampling=Sampling(stop_token_ids=frozenset({10**6}))), "stop_token_ids"),
            (job(chunk_tokens=0), "chunk_tokens"),
            (job(resume=Resume(100, state)), "resume.tokens"),
            (job(resume=Resume(0, state)), "resume.tokens"),
            (job(export=Export(state, 101)), "export"),
            (job(export=Export(state, 50, checkpoint_tokens=(60,))), "checkpoint"),
            (job(export=Export(state, 50, skip_tokens={"nothing": 1})), "skip_tokens"),
        ):
            with pytest.raises(InputError, match=message):
                Watched(engine, bad)
        assert engine.stats() == IDLE

    def test_a_full_queue_says_not_now(self, make_engine: MakeEngine) -> None:
        engine = make_engine(max_waiting=2)
        gate = GatedSegments(engine.spec)
        first = Watched(engine, job(100, 1, export=Export(gate, 100)))
        assert gate.reached.wait(PATIENCE_S)
        waiting = [Watched(engine, job(100, seed)) for seed in (2, 3)]
        refused = Watched(engine, job(100, 4))
        assert isinstance(refused.refused, NotNow) and refused.refused.retry_after_s > 0
        stats = engine.stats()
        assert (stats.waiting, stats.prefilling, stats.running) == (2, 1, 0)
        gate.open()
        assert all(one.result()[-1] == Finished("length") for one in (first, *waiting))
        assert refused.events == []
        wait_until(lambda: engine.stats() == IDLE)

    # Cancellation ---------------------------------------------------------------------------------

    def test_cancelling_what_waits(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        gate = GatedSegments(engine.spec)
        first = Watched(engine, job(100, 1, export=Export(gate, 100)))
        assert gate.reached.wait(PATIENCE_S)
        waiting, other = Watched(engine, job(100, 2)), Watched(engine, job(100, 3))
        engine.cancel("job-100-2")
        gate.open()
        assert waiting.result() == [Finished("cancelled")]
        assert first.result()[-1] == other.result()[-1] == Finished("length")

    def test_cancelling_what_is_being_prefilled(self, make_engine: MakeEngine) -> None:
        engine = make_engine(chunk_tokens=64)
        gate = GatedSegments(engine.spec)
        # At every length a state, so that the first chunk of any model meets the gate.
        export = Export(gate, 300, checkpoint_tokens=(64,))
        cancelled = Watched(engine, job(300, 1, export=export))
        other = Watched(engine, job(100, 2))
        assert gate.reached.wait(PATIENCE_S)
        engine.cancel("job-300-1")
        gate.open()
        assert cancelled.result() == [Finished("cancelled")]
        left = len(gate.segments)
        assert other.result()[-1] == Finished("length")
        assert len(gate.segments) == left, "the sink was used after the end"

    def test_cancelling_what_runs(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        other = Watched(engine, job(100, 2, sampling=greedy(30)))
        seen: list[Event] = []

        def cancel_after_three(event: Event) -> None:
            seen.append(event)
            if len(seen) == 4:
                engine.cancel("job-100-1")

        cancelled = Watched(engine, job(100, 1, sampling=greedy(30)), cancel_after_three)
        assert cancelled.result()[-1] == Finished("cancelled")
        assert len(cancelled.tokens) == 3
        assert len(other.tokens) == 30

    def test_cancelling_what_is_not_there(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.cancel("job-100-0")
        done = Watched(engine, job(100))
        assert done.result()[-1] == Finished("length")
        engine.cancel("job-100-0")
        engine.cancel("never heard of")
        assert Watched(engine, job(100)).tokens == done.tokens

    # Failures -------------------------------------------------------------------------------------

    @pytest.mark.parametrize("at", ("buffers", "ready"))
    @pytest.mark.parametrize("good", (0, 3))
    def test_a_sink_that_fails_fails_its_job_alone(
        self, make_engine: MakeEngine, at: str, good: int
    ) -> None:
        engine = make_engine(chunk_tokens=64)
        sink = BrokenSink(engine.spec, good=good, at=at)
        before = Watched(engine, job(100, 1, sampling=greedy(30)))
        broken = Watched(engine, job(200, 2, export=Export(sink, 200)))
        after = Watched(engine, job(100, 3))
        assert isinstance(broken.error, EngineError) and "the arena is gone" in str(broken.error)
        assert not any(isinstance(event, Token) for event in broken.result())
        assert len(before.tokens) == 30 and len(after.tokens) == 8

    def test_a_source_that_lacks_a_piece_fails_its_job_alone(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        state = exported(engine, 200, 150).dump()
        lacking = MemorySegments.load(engine.spec, dict(list(state.items())[:-1]))
        cut = MemorySegments.load(engine.spec, state)
        views = cut.views

        def too_short(segment: Segment) -> list[memoryview]:
            return [view[:-1] for view in views(segment)]

        cut.views = too_short  # type: ignore[method-assign]
        for source in (lacking, cut):
            broken = Watched(engine, job(200, resume=Resume(150, source)))
            assert isinstance(broken.error, EngineError)
            assert len(broken.result()) == 1
        assert len(Watched(engine, job(200)).tokens) == 8
        wait_until(lambda: engine.stats() == IDLE)

    # The end --------------------------------------------------------------------------------------

    def test_closing_ends_what_is_under_way(self, make_engine: MakeEngine) -> None:
        before = set(threading.enumerate())
        engine = make_engine(chunk_tokens=64, max_running=2)
        is_closing = threading.Event()

        def hold(event: Event) -> None:
            """Keeps the engine in its first step until it is being closed."""
            if isinstance(event, Token):
                assert is_closing.wait(PATIENCE_S)

        running = Watched(engine, job(64, 1, sampling=greedy(300)), hold)
        others = [Watched(engine, job(300, seed, sampling=greedy(90))) for seed in (2, 3, 4, 5)]
        closer = threading.Thread(target=engine.close)
        closer.start()
        wait_until(lambda: refused_as_closing(engine))
        is_closing.set()
        closer.join(PATIENCE_S)
        assert set(threading.enumerate()) <= before
        for one in (running, *others):
            last = one.result()[-1]
            assert isinstance(last, Finished) and not isinstance(last, JobFailed)
        assert others[-1].result()[-1] == Finished("cancelled")
        assert isinstance(Watched(engine, job()).refused, NotNow)
        engine.close()

    def test_stats_count_what_is_held(self, make_engine: MakeEngine) -> None:
        engine = make_engine(chunk_tokens=64)
        assert engine.stats() == IDLE
        held: list[EngineStats] = []
        done = Watched(engine, job(100), lambda event: held.append(engine.stats()))
        done.result()
        # When the fourth token is given out, the prompt and three tokens have been computed.
        assert held[4].running == 1 and held[4].kv_tokens == 103
        wait_until(lambda: engine.stats() == IDLE)
