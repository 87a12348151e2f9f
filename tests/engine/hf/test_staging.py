"""Export and import through staging, as on a GPU: on a CPU, without streams, over a kvd's arena."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from prfaas.device import StagingRing
from prfaas.engine.api import EngineJob, Export, Finished, Prefilled, Resume, Sampling
from prfaas.engine.hf import HFEngine, exporter
from prfaas.engine.hf.exporter import StagedWriter
from prfaas.engine.memory import MemorySegments
from prfaas.errors import EngineError
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import WriteLease
from prfaas.kvd.store import StoreOptions
from prfaas.kvspec import Segment
from prfaas.types import BlockHash
from prfaas_lab.testing.engine_runs import run
from tests.engine.contract import EngineContract, MakeEngine
from tests.engine.hf import models
from tests.engine.watching import BrokenSink, GatedSegments, Watched
from tests.integrations.canonical.caches import HostPins
from tests.kvd.hosts import kvd
from tests.waiting import PATIENCE_S, wait_until

PREFILL_ONLY = Sampling(max_tokens=0)
ARCHS = ("kimi-linear", "qwen3", "gemma3", "falcon-h1")
BLOCK = 16
RING_BYTES = 1 << 20


def staging(
    ring_bytes: int = RING_BYTES, timeout_s: float = PATIENCE_S
) -> tuple[StagingRing, HostPins]:
    pins = HostPins(part_bytes=1 << 14)
    return StagingRing("cpu", ring_bytes=ring_bytes, pins=pins, timeout_s=timeout_s), pins


def all_free(ring: StagingRing, ring_bytes: int = RING_BYTES) -> bool:
    ring.release(ring.allocate(ring_bytes))
    return True


@contextmanager
def staged_engine(
    arch: str, ring_bytes: int = RING_BYTES, timeout_s: float = PATIENCE_S
) -> Iterator[tuple[HFEngine, StagingRing, HostPins]]:
    ring, pins = staging(ring_bytes, timeout_s)
    engine = HFEngine(
        models.loaded(arch), block_tokens=BLOCK, chunk_tokens=64, staging=(ring, pins)
    )
    try:
        yield engine, ring, pins
        assert all_free(ring, ring_bytes)
    finally:
        engine.close()
    assert pins.registered == {}


@contextmanager
def arena(arch: str, folder: Path) -> Iterator[KvdClient]:
    loaded = models.loaded(arch)
    with (
        kvd(folder, store=StoreOptions(memory_bytes=16 << 20)) as host,
        host.engine(spec=loaded.spec, block_tokens=BLOCK, compat=loaded.compat(BLOCK)) as client,
    ):
        yield client


def named(tokens: int, seed: int) -> list[BlockHash]:
    return [BlockHash(bytes([seed, n]) + bytes(30)) for n in range(tokens // BLOCK)]


def begin(client: KvdClient, tokens: int, seed: int) -> WriteLease:
    lease = client.begin(named(tokens, seed), tokens, checkpoint_tokens=())
    assert isinstance(lease, WriteLease), lease
    return lease


def expected_bytes(arch: str, prompt: Sequence[int]) -> MemorySegments:
    """What the CPU's writer writes."""
    state = MemorySegments(models.loaded(arch).spec)
    job = EngineJob("p", prompt, PREFILL_ONLY, export=Export(state, len(prompt)))
    run(models.engine(arch), job)
    return state


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("pages", ["fresh", "fragmented"])
def test_an_arena_holds_what_the_cpus_writer_writes(arch: str, pages: str, tmp_path: Path) -> None:
    """And a job that resumes from there gives the same answer."""
    prompt = models.prompt(arch, 150)
    expected = expected_bytes(arch, prompt)
    answer = run(models.engine(arch), EngineJob("q", [*prompt, 1], Sampling(4, ignore_eos=True)))
    with arena(arch, tmp_path) as client, staged_engine(arch) as (engine, _, pins):
        others = [begin(client, 2 * BLOCK, seed) for seed in range(20 if pages != "fresh" else 0)]
        for other in others[::2]:
            other.abort("its pages lie between those of others")
        lease = begin(client, 150, 99)
        export = Export(lease, 150)
        outcome = run(engine, EngineJob("p", prompt, PREFILL_ONLY, export=export))
        assert outcome.prefilled == Prefilled(0, 150, expected.nbytes)
        for segment in expected.segments:
            assert b"".join(lease.buffers(segment)) == b"".join(expected.views(segment))
        assert pins.registered  # the copies were direct ones
        source = Written(lease)
        job = EngineJob("q", [*prompt, 1], Sampling(4, ignore_eos=True), Resume(150, source))
        assert run(engine, job).tokens == answer.tokens
        assert source.asked
        lease.abort("done")


def test_an_arena_is_registered_before_its_first_use(tmp_path: Path) -> None:
    with arena("qwen3", tmp_path) as client, staged_engine("qwen3") as (engine, _, pins):
        client.watch_memory(engine.use_memory)
        wait_until(lambda: len(pins.registered) > 10)
    engine.use_memory(mmap.mmap(-1, 4096))  # too late, and without harm
    models.engine("qwen3").use_memory(mmap.mmap(-1, 4096))  # a CPU needs no preparation


class Written:
    """What a lease has just written, as a source."""

    def __init__(self, lease: WriteLease) -> None:
        self._lease = lease
        self.asked: list[Segment] = []

    def views(self, segment: Segment) -> Sequence[memoryview]:
        raise AssertionError("views of pages are slow")

    def mapped_views(self, segment: Segment) -> object:
        self.asked.append(segment)
        return self._lease.mapped_buffers(segment)


@pytest.mark.parametrize("arch", ["kimi-linear", "falcon-h1"])
@pytest.mark.parametrize("ring_bytes", [RING_BYTES, 1 << 15])
def test_memory_that_is_not_mapped_takes_the_detour(arch: str, ring_bytes: int) -> None:
    """Also where a segment is larger than a share of the ring."""
    prompt = models.prompt(arch, 150)
    expected = expected_bytes(arch, prompt)
    state = MemorySegments(expected.spec)
    largest = max(len(data) for data in expected.dump().values())
    ring_bytes = max(ring_bytes, -(-largest // 256) * 256)
    with staged_engine(arch, ring_bytes) as (engine, _, pins):
        run(engine, EngineJob("p", prompt, PREFILL_ONLY, export=Export(state, 150)))
        assert state.dump() == expected.dump()
        job = EngineJob("q", [*prompt, 1], Sampling(4, ignore_eos=True), Resume(150, state))
        tokens = run(engine, job).tokens
        assert pins.registered == {}
    assert tokens == run(models.engine(arch), job).tokens


def test_a_source_of_another_size_fails_its_job_only() -> None:
    arch = "kimi-linear"
    prompt = models.prompt(arch, 100)
    state = expected_bytes(arch, prompt[:80])

    class Short:
        def views(self, segment: Segment) -> Sequence[memoryview]:
            first, *rest = state.views(segment)
            return (first[:-1], *rest)

    with staged_engine(arch) as (engine, _, _):
        failed = Watched(engine, EngineJob("p", prompt, resume=Resume(80, Short())))
        assert isinstance(failed.error, EngineError) and "bytes of state" in str(failed.error)
        good = EngineJob("q", prompt, Sampling(2, ignore_eos=True), Resume(80, state))
        assert len(Watched(engine, good).tokens) == 2


@pytest.mark.parametrize("at", ["buffers", "ready"])
def test_a_sink_that_raises_fails_its_job_only(at: str) -> None:
    arch = "kimi-linear"
    prompt = models.prompt(arch, 150)
    with staged_engine(arch) as (engine, ring, _):
        sink = BrokenSink(engine.spec, good=3, at=at)
        failed = Watched(engine, EngineJob("p", prompt, PREFILL_ONLY, export=Export(sink, 150)))
        assert "the arena is gone" in str(failed.error)
        assert all_free(ring)
        state = MemorySegments(engine.spec)
        run(engine, EngineJob("q", prompt, PREFILL_ONLY, export=Export(state, 150)))
    assert state.dump() == expected_bytes(arch, prompt).dump()


def test_a_slow_sink_holds_the_engine_up_for_the_rings_timeout_at_most() -> None:
    arch = "kimi-linear"
    prompt = models.prompt(arch, 150)
    with staged_engine(arch, timeout_s=0.3) as (engine, ring, _):
        sink = GatedSegments(engine.spec)
        begin_s = time.monotonic()
        failed = Watched(engine, EngineJob("p", prompt, PREFILL_ONLY, export=Export(sink, 150)))
        other = Watched(engine, EngineJob("q", prompt, Sampling(2, ignore_eos=True)))
        assert "within 0.3 s" in str(failed.error)
        assert time.monotonic() - begin_s < PATIENCE_S
        assert len(other.tokens) == 2
        assert all_free(ring)  # although the sink has not returned
        sink.open()
        wait_until(lambda: not any(t.name == "prfaas-export" for t in threading.enumerate()))
        assert sink.segments == ()


class SlowlyBroken(MemorySegments):
    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        time.sleep(0.3)
        raise OSError("the arena is gone")


def test_a_failed_sink_does_not_keep_staging() -> None:
    """The launching thread, which waits for staging, learns of the failure at once."""
    ring = StagingRing("cpu", ring_bytes=1 << 14, timeout_s=5.0)
    sink = SlowlyBroken(models.loaded("qwen3").spec)
    group = sink.spec.groups[0]
    row = torch.ones((1, group.bytes_per_token), dtype=torch.uint8)  # type: ignore[union-attr]
    writer = StagedWriter(sink, ring)
    with pytest.raises(EngineError, match="the arena is gone"):
        for token in range(100):  # more than staging holds
            writer.write(Segment(group.name, group.layers[0], token, token + 1), (row,))
    writer.abort()
    assert all_free(ring, 1 << 14)


class Trickle(MemorySegments):
    """Every call takes a while."""

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        time.sleep(0.05)
        return super().buffers(segment)


def test_many_short_calls_of_a_sink_count_together() -> None:
    ring = StagingRing("cpu", ring_bytes=RING_BYTES, timeout_s=0.3)
    sink = Trickle(models.loaded("qwen3").spec)
    group = sink.spec.groups[0]
    row = torch.ones((1, group.bytes_per_token), dtype=torch.uint8)  # type: ignore[union-attr]
    writer = StagedWriter(sink, ring)
    begin_s = time.monotonic()
    with pytest.raises(EngineError, match=r"within 0\.3 s"):
        for token in range(1000):
            writer.write(Segment(group.name, group.layers[0], token, token + 1), (row,))
        writer.finish()
    writer.abort()
    assert time.monotonic() - begin_s < 20  # of 50 s that the calls would take
    assert all_free(ring)


def test_a_full_ring_fails_the_job_after_its_timeout() -> None:
    arch = "kimi-linear"
    prompt = models.prompt(arch, 150)
    with staged_engine(arch, timeout_s=0.2) as (engine, ring, _):
        taken = ring.allocate(RING_BYTES)
        state = MemorySegments(engine.spec)
        failed = Watched(engine, EngineJob("p", prompt, PREFILL_ONLY, export=Export(state, 150)))
        assert "staging" in str(failed.error)
        ring.release(taken)


class Copies(StagingRing):
    """The device does nothing before it is let: a copy into pages ends with `end_write`."""

    def __init__(self) -> None:
        super().__init__("cpu", ring_bytes=RING_BYTES, timeout_s=0.05)
        self.reached, self.let = threading.Event(), threading.Event()
        self.ended = 0

    def end_write(self, chunk: object) -> int:
        self.reached.set()
        self.ended += 1
        assert self.let.wait(PATIENCE_S)
        return super().end_write(chunk)  # type: ignore[arg-type]


def test_segments_that_become_ready_at_once_are_copied_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "HOLD_S", 1e9)
    ring = Copies()
    sink = MemorySegments(models.loaded("qwen3").spec)
    group = sink.spec.groups[0]
    width = group.bytes_per_token  # type: ignore[union-attr]
    segments = [Segment(group.name, layer, 0, 8) for layer in group.layers]
    writer = StagedWriter(sink, ring)
    for segment in segments:
        writer.write(segment, (torch.ones((8, width), dtype=torch.uint8),))
    assert not ring.reached.is_set(), "there may be more in a moment"
    writer.flush()
    assert ring.reached.wait(PATIENCE_S)
    ring.let.set()
    writer.finish()
    assert ring.ended == 1
    assert all(b"".join(sink.views(segment)) == bytes([1]) * 8 * width for segment in segments)


def test_segments_that_become_ready_during_a_copy_are_copied_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "HOLD_S", 0.0)
    ring = Copies()
    sink = MemorySegments(models.loaded("qwen3").spec)
    group = sink.spec.groups[0]
    width = group.bytes_per_token  # type: ignore[union-attr]
    segments = [Segment(group.name, layer, 0, 8) for layer in group.layers]
    assert len(segments) > 2
    writer = StagedWriter(sink, ring)
    for number, segment in enumerate(segments):
        writer.write(segment, (torch.full((8, width), number, dtype=torch.uint8),))
        assert ring.reached.wait(PATIENCE_S)  # the first is on its way at once
    ring.timeout_s = writer._patience_s = PATIENCE_S
    ring.let.set()
    writer.finish()
    assert ring.ended == 2 and list(sink.segments) == segments
    for number, segment in enumerate(segments):
        assert bytes(sink._written[segment]) == bytes([number]) * 8 * width
    assert all_free(ring)


def test_an_abort_waits_for_the_copy_under_way_and_drops_the_queued_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter, "HOLD_S", 0.0)
    ring = Copies()
    sink = MemorySegments(models.loaded("qwen3").spec)
    group = sink.spec.groups[0]
    segments = [Segment(group.name, layer, 0, 8) for layer in group.layers[:2]]
    writer = StagedWriter(sink, ring)
    width = group.bytes_per_token  # type: ignore[union-attr]
    for segment in segments:
        writer.write(segment, (torch.ones((8, width), dtype=torch.uint8),))
    assert ring.reached.wait(PATIENCE_S)
    aborted = threading.Thread(target=writer.abort)
    aborted.start()
    aborted.join(0.3)
    assert aborted.is_alive()  # a copy is under way: the ring's timeout does not matter
    ring.let.set()
    aborted.join(PATIENCE_S)
    assert not aborted.is_alive()
    assert bytes(sink._written[segments[0]]) == bytes([1]) * 8 * width
    if segments[1] in sink._written:
        assert not any(sink._written[segments[1]])
    assert all_free(ring)


def test_a_cancelled_job_ends_after_its_loads() -> None:
    """The source's lease may be released as soon as the job has ended."""
    arch = "kimi-linear"
    prompt = models.prompt(arch, 150)
    state = expected_bytes(arch, prompt[:80])
    order: list[str] = []

    class Loads(StagingRing):
        def finish_loads(self) -> None:
            order.append("loads")
            super().finish_loads()

    ring = Loads("cpu", ring_bytes=RING_BYTES, timeout_s=PATIENCE_S)
    engine = HFEngine(models.loaded(arch), chunk_tokens=8, staging=(ring, HostPins()))
    try:
        sink = GatedSegments(engine.spec)
        sink.open()
        job = EngineJob("p", prompt, PREFILL_ONLY, resume=Resume(80, state))

        def cancel_now(segment: Segment) -> Sequence[memoryview]:
            engine.cancel("p")
            return MemorySegments.views(state, segment)

        state.views = cancel_now  # type: ignore[method-assign]
        watched = Watched(engine, job, lambda event: order.append(type(event).__name__))
        assert watched.result()[-1] == Finished("cancelled")
        assert order == ["loads", "Finished"]
    finally:
        engine.close()


@pytest.mark.grid
class TestContractWithStaging(EngineContract):
    @pytest.fixture
    def make_engine(self) -> Iterator[MakeEngine]:
        made: list[HFEngine] = []

        def make(**options: Any) -> HFEngine:
            made.append(HFEngine(models.loaded("kimi-linear"), staging=staging(), **options))
            return made[-1]

        yield make
        for engine in made:
            engine.close()
