"""Staging is bounded, waits for a limited time, and is given back after every failure."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from prfaas.device import StagingRing, page_copies, staging
from prfaas.errors import EngineError, InputError
from prfaas.integrations.canonical import AttentionConverter, AttentionForm
from prfaas.kvspec.parts import Part
from tests.integrations.canonical.caches import HostPins, Pages, raw

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

    def query(self) -> bool:
        return True


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
    monkeypatch.setattr(page_copies, "_copy_2d", lambda: page_copies._copy_on_host)
    monkeypatch.setattr(page_copies, "_copy_batch", lambda: None)
    return noted


def with_streams(ring: StagingRing, log: list[str]) -> StagingRing:
    ring.memory.outs[:] = [FakeStream("out", log)]  # type: ignore[list-item]
    ring.memory.ins[:] = [FakeStream("in", log)]  # type: ignore[list-item]
    return ring


@pytest.mark.parametrize("pinned", [False, True])
def test_a_save_waits_for_the_gather_and_the_host_for_the_copy(
    log: list[str], pinned: bool
) -> None:
    ring = StagingRing(
        "cpu", ring_bytes=8 * BLOCK_BYTES, pins=HostPins() if pinned else None, timeout_s=0
    )
    layer, cache = converter(with_streams(ring, log))
    staged = layer.stage([3], 0, 16)
    assert log == []  # the compute stream goes on
    pages = Pages(BLOCK_BYTES, [700])
    staged.finish(pages.views)
    assert pages.content == raw(cache[3].transpose(0, 1).unflatten(-1, (2, 8)).transpose(1, 2))
    assert log[:2] == ["out waits for compute", "on out"]
    assert set(log[2:]) == {"host waits for out"}
    assert all_free(ring)


@pytest.mark.parametrize("pinned", [False, True])
def test_a_load_waits_for_the_fence_and_the_host_for_the_scatter(
    log: list[str], pinned: bool
) -> None:
    ring = StagingRing(
        "cpu", ring_bytes=8 * BLOCK_BYTES, pins=HostPins() if pinned else None, timeout_s=0
    )
    layer, cache = converter(with_streams(ring, log))
    pages = Pages(2 * BLOCK_BYTES, [700])
    rows = torch.randn(32, 2, 2, 8)
    pages.content = raw(rows)
    ring.fence()
    layer.load([5, 4], 0, 32, pages.views, wait=False)
    assert log == ["in waits for compute", "on in"] * 2  # two chunks
    ring.finish_loads()
    assert set(log[4:]) == {"host waits for in"}
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


# Into tensors -------------------------------------------------------------------------------------


def filled_pages(nbytes: int, cuts: list[int]) -> Pages:
    pages = Pages(nbytes, cuts)
    pages.content = bytes(n % 251 for n in range(nbytes))
    return pages


@pytest.mark.parametrize("pinned", [False, True])
def test_pages_are_read_into_tensors(pinned: bool) -> None:
    """Without registered pages also in several pieces: the ring is smaller."""
    ring = StagingRing("cpu", ring_bytes=8 * 1024, pins=HostPins() if pinned else None, timeout_s=0)
    nbytes = [3_000, 5_000, 20_000]
    pages = [filled_pages(n, [7, 1_000, 2_900]) for n in nbytes]
    targets = [torch.zeros(n // 100, 100, dtype=torch.uint8) for n in nbytes]
    ring.copy_to((t, page.views) for t, page in zip(targets, pages, strict=True))
    ring.finish_loads()
    for target, page in zip(targets, pages, strict=True):
        assert raw(target) == page.content
    ring.release(ring.allocate(8 * 1024))


@pytest.mark.parametrize("pinned", [False, True])
def test_the_compute_stream_waits_for_tensors_and_the_host_does_not(
    log: list[str], pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "_TOGETHER_BYTES", 1)
    pins = HostPins() if pinned else None
    ring = with_streams(StagingRing("cpu", ring_bytes=1 << 16, pins=pins, timeout_s=0), log)
    pages = [filled_pages(4_000, [1_000]) for _ in range(2)]
    targets = [torch.zeros(40, 100, dtype=torch.uint8) for _ in pages]
    ring.copy_to((t, page.views) for t, page in zip(targets, pages, strict=True))
    assert log == ["in waits for compute", "on in"] * 2 + ["compute waits for in"]
    if pins is not None:
        assert [m.users for m in pins._mappings.values()] == [1] * len(pins._mappings)
    ring.finish_loads()
    assert set(log[5:]) == {"host waits for in"}
    if pins is not None:
        assert all(mapping.users == 0 for mapping in pins._mappings.values())
    assert [raw(target) for target in targets] == [page.content for page in pages]
    ring.release(ring.allocate(1 << 16))


def test_tensors_from_one_mapping_are_filled_together(log: list[str]) -> None:
    pins = HostPins()
    ring = with_streams(StagingRing("cpu", ring_bytes=1 << 16, pins=pins, timeout_s=0), log)
    pages = filled_pages(9_000, [1_000, 3_000, 7_000])
    targets = [torch.zeros(n, dtype=torch.uint8) for n in (3_000, 4_000, 2_000)]
    first, second, third, fourth = pages.views
    ring.copy_to(zip(targets, ([first, second], [third], [fourth]), strict=True))
    assert log == ["in waits for compute", "on in", "compute waits for in"]
    assert [m.users for m in pins._mappings.values()] == [1]
    ring.finish_loads()
    assert [m.users for m in pins._mappings.values()] == [0]
    assert b"".join(raw(target) for target in targets) == pages.content
    with pytest.raises(EngineError, match="do not fit"):  # none of them is written
        ring.copy_to([(targets[0], [fourth]), (targets[2], [first, second])])


def test_a_failure_among_tensors_waits_for_the_device(log: list[str]) -> None:
    pins = HostPins()
    ring = with_streams(StagingRing("cpu", ring_bytes=1 << 16, pins=pins, timeout_s=0), log)
    pages = filled_pages(4_000, [])

    def loads() -> Iterator[tuple[torch.Tensor, list[memoryview]]]:
        yield torch.zeros(4_000, dtype=torch.uint8), pages.views
        raise EngineError("the next segment is missing")

    with pytest.raises(EngineError, match="missing"):
        ring.copy_to(loads())
    assert "host waits for all" in log
    assert all(mapping.users == 0 for mapping in pins._mappings.values())
    with pytest.raises(EngineError, match="do not fit"):
        ring.copy_to([(torch.zeros(3_999, dtype=torch.uint8), pages.views)])
    ring.release(ring.allocate(1 << 16))
