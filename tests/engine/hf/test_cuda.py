"""The engine's copies on a GPU: the same bytes as on a CPU, and nothing waits that need not. On a
machine with a GPU: make test-gpu."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch

from prfaas.device import PagePins, StagingRing
from prfaas.engine.api import EngineJob, Event, Export, Finished, Resume, Sampling
from prfaas.engine.chunks import resume_segments
from prfaas.engine.hf import HFEngine, LoadedModel, exporter, load_model, rows
from prfaas.engine.hf.exporter import ExportingCache, StagedWriter
from prfaas.engine.hf.importer import import_state
from prfaas.engine.memory import MemorySegments
from prfaas.kvspec import KVSpec, LinearState, Segment, SegmentSink
from prfaas_lab.testing.engine_runs import run
from tests.engine.hf import models
from tests.engine.hf.arenas import ArenaSegments
from tests.waiting import wait_until

pytestmark = pytest.mark.gpu

ARCHS = ("kimi-linear", "qwen3", "gemma3", "falcon-h1")
PREFILL_ONLY = Sampling(max_tokens=0)
TOKENS = 150
RING_BYTES = 16 << 20


@functools.cache
def on_gpu(arch: str) -> LoadedModel:
    return load_model(models.checkpoint(arch), device="cuda")


@contextmanager
def gpu_engine(arch: str) -> Iterator[HFEngine]:
    pins = PagePins("cuda", part_bytes=1 << 21)
    ring = StagingRing("cuda", ring_bytes=RING_BYTES, pins=pins, timeout_s=30.0)
    engine = HFEngine(on_gpu(arch), block_tokens=16, chunk_tokens=64, staging=(ring, pins))
    try:
        yield engine
        ring.release(ring.allocate(RING_BYTES))  # nothing holds staging
    finally:
        engine.close()


class PlainWriter:
    """The slow and simple way."""

    def __init__(self, sink: SegmentSink, ring: object) -> None:
        self._sink = sink

    def write(self, segment: Segment, parts: rows.Rows) -> None:
        torch.cuda.synchronize()
        rows.write(tuple(part.cpu() for part in parts), self._sink.buffers(segment))
        self._sink.ready(segment)

    def finish(self) -> None: ...

    def abort(self) -> None: ...


def exported(engine: HFEngine, sink: SegmentSink, prompt: Sequence[int]) -> None:
    job = EngineJob("p", prompt, PREFILL_ONLY, export=Export(sink, len(prompt)))
    run(engine, job)


@pytest.mark.parametrize("arch", ARCHS)
def test_bytes_in_pages_are_those_of_plain_copies(
    arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = models.prompt(arch, TOKENS)
    spec = on_gpu(arch).spec
    expected, detour = MemorySegments(spec), MemorySegments(spec)
    fresh, scattered = (ArenaSegments(spec, TOKENS, scattered=s) for s in (False, True))
    with gpu_engine(arch) as engine:
        with monkeypatch.context() as patched:
            patched.setattr(exporter, "StagedWriter", PlainWriter)
            exported(engine, expected, prompt)
        for sink in (fresh, scattered, detour):
            exported(engine, sink, prompt)
    assert detour.dump() == expected.dump()
    for segment in expected.segments:
        bytes_of = b"".join(expected.views(segment))
        assert fresh.content(segment) == bytes_of, segment.name
        assert scattered.content(segment) == bytes_of, segment.name


def random_state(spec: KVSpec, tokens: int, *, scattered: bool) -> ArenaSegments:
    state = ArenaSegments(spec, tokens, scattered=scattered)
    generator = torch.Generator().manual_seed(1)
    for segment in resume_segments(spec, tokens):
        for view in state.views(segment):
            target = torch.frombuffer(view, dtype=torch.uint8)
            # Small exponents, so that no number is infinite.
            target.copy_(torch.randint(0, 60, target.shape, generator=generator))
    return state


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("scattered", [False, True])
def test_tensors_on_the_gpu_are_the_bytes_of_the_pages(arch: str, scattered: bool) -> None:
    loaded = on_gpu(arch)
    state = random_state(loaded.spec, TOKENS, scattered=scattered)
    on_cpu = dataclasses.replace(loaded, device=torch.device("cpu"))
    expected = ExportingCache(loaded, None, None)
    pins = PagePins("cuda", part_bytes=1 << 21)
    for given in (pins, None):  # directly, and over the host's staging
        ring = StagingRing("cuda", ring_bytes=RING_BYTES, pins=given)
        found = ExportingCache(loaded, None, ring)
        with torch.inference_mode():
            import_state(on_cpu, expected, Resume(TOKENS, state))
            import_state(loaded, found, Resume(TOKENS, state), ring)
            torch.cuda.current_stream().synchronize()  # it waits for the copies
        for segment in resume_segments(loaded.spec, TOKENS):
            one, other = expected.layers[segment.layer], found.layers[segment.layer]
            if isinstance(loaded.spec[segment.group], LinearState):
                pairs = [(one.recurrent_states[0], other.recurrent_states[0])]
            else:
                pairs = [(one.keys, other.keys), (one.values, other.values)]
            for host, device in pairs:
                assert device.device.type == "cuda"
                assert torch.equal(host, device.cpu()), segment.name
        ring.finish_loads()
        ring.release(ring.allocate(RING_BYTES))
        ring.close()


@pytest.mark.parametrize("arch", ARCHS)
def test_an_answer_from_pages_is_that_from_plain_memory(arch: str) -> None:
    prompt = models.prompt(arch, TOKENS + 1)
    spec = on_gpu(arch).spec
    plain, arena = MemorySegments(spec), ArenaSegments(spec, TOKENS, scattered=True)
    with gpu_engine(arch) as engine:
        engine.use_memory(arena.arena.memory)
        for sink in (plain, arena):
            exported(engine, sink, prompt[:TOKENS])
        tokens = [
            run(
                engine,
                EngineJob("q", prompt, Sampling(8, ignore_eos=True), Resume(TOKENS, source)),
            ).tokens
            for source in (plain, arena)
        ]
    assert tokens[0] == tokens[1]


def busy(seconds: float = 0.5) -> None:
    """Queues work of about this time on the current stream."""
    square = torch.ones((4096, 4096), device="cuda")
    square @ square
    torch.cuda.synchronize()
    begin_s = time.monotonic()
    for _ in range(10):
        square @ square
    torch.cuda.synchronize()
    each_s = (time.monotonic() - begin_s) / 10
    for _ in range(int(seconds / each_s) + 1):
        square @ square


def test_the_launching_thread_waits_for_no_copy() -> None:
    spec = on_gpu("qwen3").spec
    group = spec.groups[0]
    assert not isinstance(group, LinearState)
    sink = ArenaSegments(spec, TOKENS)
    segment = Segment(group.name, group.layers[0], 0, TOKENS)
    parts = (torch.ones((TOKENS, group.bytes_per_token), dtype=torch.uint8, device="cuda"),)
    ring = StagingRing("cuda", ring_bytes=RING_BYTES, pins=PagePins("cuda"), timeout_s=30.0)
    target = torch.zeros((TOKENS, group.bytes_per_token), dtype=torch.uint8, device="cuda")
    first = StagedWriter(sink, ring)  # registers the pages
    first.write(segment, parts)
    first.finish()
    ring.copy_to([(target, sink.mapped_views(segment))])
    ring.finish_loads()
    writer = StagedWriter(sink, ring)
    busy(1.0)
    was_busy = torch.cuda.Event()
    was_busy.record()
    parts[0].fill_(7)
    writer.write(segment, parts)
    ring.copy_to([(target, sink.mapped_views(segment))])
    assert not was_busy.query()  # the device still has what was queued before
    assert set(sink.content(segment)) == {1}
    writer.finish()
    assert set(sink.content(segment)) == {7}
    ring.finish_loads()
    ring.close()


def test_an_aborted_export_leaves_the_pages_alone() -> None:
    spec = on_gpu("qwen3").spec
    group = spec.groups[0]
    assert not isinstance(group, LinearState)
    sink = ArenaSegments(spec, TOKENS)
    ring = StagingRing("cuda", ring_bytes=RING_BYTES, pins=PagePins("cuda"), timeout_s=30.0)
    parts = (torch.ones((TOKENS, group.bytes_per_token), dtype=torch.uint8, device="cuda"),)
    segments = [Segment(group.name, layer, 0, TOKENS) for layer in group.layers]
    writer = StagedWriter(sink, ring)
    busy(0.3)
    for segment in segments:
        writer.write(segment, parts)
    writer.abort()
    for segment in segments:
        for view in sink.views(segment):
            view[:] = bytes(len(view))
    torch.cuda.synchronize()
    assert not any(any(sink.content(segment)) for segment in segments)
    ring.release(ring.allocate(RING_BYTES))
    ring.close()


def test_a_cancelled_job_gives_everything_back() -> None:
    arch = "kimi-linear"
    prompt = models.prompt(arch, TOKENS + 1)
    spec = on_gpu(arch).spec
    state = random_state(spec, TOKENS, scattered=True)
    with gpu_engine(arch) as engine:
        finished: list[Event] = []
        for n in range(10):
            job = EngineJob(f"c{n}", prompt, Sampling(2, ignore_eos=True), Resume(TOKENS, state))
            engine.submit(job, finished.append)
            engine.cancel(job.id)
        wait_until(lambda: sum(isinstance(e, Finished) for e in finished) == 10)


def test_memory_is_registered_ahead_and_given_back() -> None:
    state = ArenaSegments(on_gpu("qwen3").spec, TOKENS)
    memory = state.arena.memory
    for _ in range(2):  # the second time fails if the first one left something registered
        with gpu_engine("qwen3") as engine:
            engine.use_memory(memory, wait_s=30.0)
            assert engine._ring is not None and engine._ring._pins is not None
            pins = engine._ring._pins
            mapping = pins._mappings[id(memory)]
            assert len(mapping.parts) == mapping.count
            assert not pins._refused
        assert pins._mappings == {}
