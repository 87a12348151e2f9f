"""Staging is bounded, waits for a limited time, and is given back after every failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from prfaas.errors import EngineError, InputError
from prfaas.integrations.canonical import AttentionConverter, AttentionForm, StagingRing
from prfaas.kvspec.parts import Part
from tests.integrations.canonical.caches import Pages, raw

FORM = AttentionForm(
    "content", (Part("keys", (2, 8), "float32"), Part("values", (2, 8), "float32")), range(2)
)
BLOCK_BYTES = 16 * 128


def converter(ring: StagingRing) -> tuple[AttentionConverter, torch.Tensor]:
    cache = torch.randn(40, 2, 16, 16)
    return AttentionConverter(cache, 40, FORM, ring), cache


def all_free(ring: StagingRing) -> bool:
    ring.release(ring.allocate(8 * BLOCK_BYTES))  # all of it, without waiting
    return True


def small_ring(timeout_s: float = 0.0) -> StagingRing:
    return StagingRing("cpu", ring_bytes=8 * BLOCK_BYTES, timeout_s=timeout_s)


def test_a_segment_larger_than_the_ring_is_saved_and_loaded_in_chunks() -> None:
    ring = small_ring()
    layer, cache = converter(ring)
    ids = list(range(30, 0, -1))
    pages = Pages(30 * BLOCK_BYTES, [1000, 20_000])
    assert layer.save(ids, 0, 480, pages.views) == 30 * BLOCK_BYTES
    rows = cache[ids].transpose(1, 2).unflatten(-1, (2, 8)).transpose(2, 3)
    assert pages.content == raw(rows)
    before = cache[ids].clone()
    cache[ids] = float("nan")
    layer.load(ids, 0, 480, pages.views)
    assert torch.equal(cache[ids], before)
    assert all_free(ring)


def test_stages_are_finished_in_any_order() -> None:
    ring = small_ring()
    layer, cache = converter(ring)
    staged = [layer.stage([block], 0, 16) for block in (3, 4, 5)]
    expected = [cache[b].transpose(0, 1).unflatten(-1, (2, 8)).transpose(1, 2) for b in (3, 4, 5)]
    expected = [rows.clone() for rows in expected]
    cache.fill_(float("nan"))  # the blocks have other owners by now
    for index in (1, 2, 0):
        pages = Pages(BLOCK_BYTES, [])
        assert staged[index].finish(pages.views) == BLOCK_BYTES
        assert pages.content == raw(expected[index])
    assert all_free(ring)


def test_full_staging_waits_for_a_limited_time() -> None:
    ring = small_ring(timeout_s=0.05)
    layer, _ = converter(ring)
    staged = layer.stage(list(range(8)), 0, 128)
    with pytest.raises(EngineError, match=r"within 0\.05 s"):
        layer.stage([9], 0, 16)
    staged.discard()
    staged.discard()  # idempotent
    assert all_free(ring)


def test_staging_that_is_released_wakes_a_thread_that_waits() -> None:
    ring = small_ring(timeout_s=20.0)
    layer, _ = converter(ring)
    staged = layer.stage(list(range(8)), 0, 128)
    timer = threading.Timer(0.05, staged.discard)
    timer.start()
    layer.stage([9], 0, 16).discard()
    timer.join(20.0)
    assert all_free(ring)


def test_what_does_not_fit_into_the_ring_cannot_be_staged() -> None:
    ring = small_ring()
    layer, _ = converter(ring)
    with pytest.raises(EngineError, match="staging"):
        layer.stage(list(range(9)), 0, 144)
    assert all_free(ring)
    with pytest.raises(EngineError, match="do not fit into staging"):
        ring.allocate(8 * BLOCK_BYTES + 1)


def test_failures_give_staging_back() -> None:
    ring = small_ring()
    layer, cache = converter(ring)
    short = Pages(BLOCK_BYTES - 1, []).views
    with pytest.raises(EngineError, match="bytes"):
        layer.stage([1], 0, 16).finish(short)
    with pytest.raises(EngineError, match="bytes"):
        layer.save([1], 0, 16, short)
    with pytest.raises(EngineError, match="read-only"):
        layer.save([1], 0, 16, [memoryview(bytes(BLOCK_BYTES))])
    with pytest.raises(EngineError, match="read-only"):
        layer.stage([1, 2, 3, 4, 5], 0, 80).finish([memoryview(bytes(5 * BLOCK_BYTES))])
    assert all_free(ring)
    cache[2] = 1e9  # beyond float16
    parts = (Part("keys", (2, 8), "float16"), Part("values", (2, 8), "float16"))
    narrow = AttentionConverter(cache, 40, AttentionForm("content", parts, range(2)), ring)
    with pytest.raises(EngineError, match="float16"):
        narrow.save([1, 2], 0, 32, Pages(32 * 64, []).views)
    with pytest.raises(EngineError, match="float16"):
        narrow.stage([1, 2], 0, 32)
    assert all_free(ring)


def test_a_failed_load_gives_staging_back() -> None:
    ring = small_ring()
    cache = torch.zeros(4, 2, 16, 16, dtype=torch.float16)
    layer = AttentionConverter(cache, 4, FORM, ring)
    pages = Pages(BLOCK_BYTES, [])
    pages.content = raw(torch.full((512,), 1e9))
    with pytest.raises(EngineError, match="float16"):
        layer.load([1], 0, 16, pages.views)
    assert all_free(ring)


def test_a_converter_on_a_cpu_saves_at_once() -> None:
    layer = AttentionConverter(torch.zeros(4, 2, 16, 16), 4, FORM)
    with pytest.raises(EngineError, match="use save"):
        layer.stage([1], 0, 16)


def test_tiny_staging_is_refused() -> None:
    with pytest.raises(InputError, match="ring_bytes"):
        StagingRing("cpu", ring_bytes=1000)


# The streams of a GPU, without one ----------------------------------------------------------------


class FakeStream:
    """Notes in which order work waits for other work; the copies themselves are done at once."""

    cuda_stream = 1

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_event(self, event: FakeEvent) -> None:
        self.log.append(f"{self.name} waits for {event.stream}")


class FakeEvent:
    stream = "nothing"

    def __init__(self, blocking: bool) -> None:
        self.log: list[str] = []

    def record(self, stream: FakeStream) -> None:
        self.stream, self.log = stream.name, stream.log

    def synchronize(self) -> None:
        self.log.append(f"host waits for {self.stream}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    noted: list[str] = []
    compute = FakeStream("compute", noted)

    @contextmanager
    def stream(chosen: FakeStream) -> Iterator[None]:
        noted.append(f"on {chosen.name}")
        yield

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: compute)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(
        torch.cuda, "synchronize", lambda device: noted.append("host waits for all")
    )
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return noted


def with_streams(ring: StagingRing, log: list[str]) -> StagingRing:
    ring._out = FakeStream("out", log)  # type: ignore[assignment]
    ring._in = FakeStream("in", log)  # type: ignore[assignment]
    return ring


@pytest.mark.parametrize("pinned", [False, True])
def test_a_save_waits_for_the_gather_and_the_host_for_the_copy(
    log: list[str], pinned: bool
) -> None:
    ring = StagingRing("cpu", ring_bytes=8 * BLOCK_BYTES, pages_pinned=pinned, timeout_s=0)
    layer, cache = converter(with_streams(ring, log))
    staged = layer.stage([3], 0, 16)
    if not pinned:  # the copy is on its way before the next layer
        assert log == ["out waits for compute", "on out"]
    pages = Pages(BLOCK_BYTES, [700])
    staged.finish(pages.views)
    assert pages.content == raw(cache[3].transpose(0, 1).unflatten(-1, (2, 8)).transpose(1, 2))
    waits = log.index("out waits for compute")
    assert "host waits for out" in log[waits:]
    assert all_free(ring)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_load_waits_for_the_fence_and_the_host_for_the_scatter(
    log: list[str], pinned: bool
) -> None:
    ring = StagingRing("cpu", ring_bytes=8 * BLOCK_BYTES, pages_pinned=pinned, timeout_s=0)
    layer, cache = converter(with_streams(ring, log))
    pages = Pages(2 * BLOCK_BYTES, [700])
    rows = torch.randn(32, 2, 2, 8)
    pages.content = raw(rows)
    ring.fence()
    layer.load([5, 4], 0, 32, pages.views, wait=False)
    assert log == ["in waits for compute", "on in"]
    ring.finish_loads()
    assert log[2:] == ["host waits for in"]
    found = cache[[5, 4]].transpose(1, 2).flatten(0, 1).unflatten(-1, (2, 8)).transpose(1, 2)
    assert torch.equal(found, rows)
    assert all_free(ring)


def test_staging_of_loads_is_taken_back_when_it_is_needed(log: list[str]) -> None:
    ring = StagingRing("cpu", ring_bytes=8 * BLOCK_BYTES, timeout_s=0)
    layer, _ = converter(with_streams(ring, log))
    pages = Pages(BLOCK_BYTES, [])
    pages.fill(0)
    for _ in range(20):
        layer.load([5], 0, 16, pages.views, wait=False)
    ring.finish_loads()
    assert all_free(ring)


def test_after_a_failure_the_device_is_done_before_staging_is_used_again(log: list[str]) -> None:
    ring = with_streams(StagingRing("cpu", ring_bytes=8 * BLOCK_BYTES, timeout_s=0), log)
    cache = torch.full((4, 2, 16, 16), 1e9)
    parts = (Part("keys", (2, 8), "float16"), Part("values", (2, 8), "float16"))
    narrow = AttentionConverter(cache, 4, AttentionForm("content", parts, range(2)), ring)
    with pytest.raises(EngineError, match="float16"):
        narrow.stage([1], 0, 16)
    assert log == ["host waits for all"]
    assert all_free(ring)
