"""The native form as on a GPU, on a CPU: whole blocks of several layers at once, over staging."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.device import StagingRing
from prfaas.device.staging_memory import StagingMemory
from prfaas.errors import EngineError
from prfaas.integrations.vllm.caches import forms as forms_module
from prfaas.integrations.vllm.caches.forms import make_copies
from prfaas.integrations.vllm.caches.groups import CacheGroup, CacheLayout, Kind, Move
from prfaas.integrations.vllm.caches.layer_copies import LayerCopies, native_copies
from prfaas.integrations.vllm.steps import LoadOrder, SaveOrder, StepOrders
from prfaas.integrations.vllm.worker_forms import WorkerForms
from prfaas.integrations.vllm.worker_side import WorkerSide
from prfaas.kvspec import FullAttention, KVSpec, LinearState, SlidingWindow
from tests.vllm.fake_kvd import HostPins, Kvd
from tests.vllm.test_staged_worker import hold_copies
from tests.waiting import wait_until

BLOCK, BLOCKS, WINDOW = 16, 24, 40
HEADS, CONTENT = 2, 20  # bfloat16
PAGE = BLOCK * HEADS * CONTENT * 2
STATE = PAGE - 300  # the rest of a page is padding


def native(layers: int, shards: int = 1, shard: int = 0) -> CacheLayout:
    """Full attention, windows and states, each with so many layers of which this worker has one
    shard, as `native_layout` numbers them."""
    kinds: tuple[Kind, ...] = ("full", "window", "state")
    numbers = [[(at * layers + n) * shards for n in range(layers)] for at in range(3)]
    full, window, state = (
        tuple(number + one for one in range(shards) for number in some) for some in numbers
    )
    spec = KVSpec(
        (
            FullAttention("full0", full, PAGE // BLOCK),
            SlidingWindow("window1", window, PAGE // BLOCK, WINDOW),
            LinearState("state2", state, STATE),
        )
    )
    groups = [
        CacheGroup(
            at,
            kind,
            spec.groups[at],
            BLOCK,
            tuple((f"{kind}.{n}", number + shard) for n, number in enumerate(numbers[at])),
        )
        for at, kind in enumerate(kinds)
    ]
    return CacheLayout(tuple(groups), spec, BLOCK, whole=BLOCK)


class Caches:
    """As vLLM allocates them: layers of different groups share storage, because a block belongs to
    one group at a time."""

    def __init__(self, layers: int, order: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = (BLOCKS, PAGE)
        self.storages = [
            torch.randint(0, 256, sizes, dtype=torch.uint8, generator=generator)
            for _ in range(layers)
        ]
        self.by_layer: dict[str, torch.Tensor] = {}
        for n, storage in enumerate(self.storages):
            numbers = storage.view(torch.bfloat16)
            if order == "HND":
                attention = numbers.view(BLOCKS, HEADS, BLOCK, CONTENT)
            elif order == "NHD":
                attention = numbers.view(BLOCKS, BLOCK, HEADS, CONTENT).transpose(1, 2)
            else:  # kernel blocks
                attention = numbers.view(BLOCKS * 4, HEADS, BLOCK // 4, CONTENT)
            self.by_layer[f"full.{n}"] = self.by_layer[f"window.{n}"] = attention
            state = storage.view(torch.int8).view(BLOCKS, 1, 1, PAGE)[..., :STATE]
            self.by_layer[f"state.{n}"] = state

    def content(self) -> list[bytes]:
        return [storage.numpy().tobytes() for storage in self.storages]

    def spoil(self) -> None:
        for storage in self.storages:
            storage.fill_(0xA5)


def copies_of(layout: CacheLayout, caches: Caches, ring: StagingRing | None) -> LayerCopies:
    return native_copies(layout, caches.by_layer, BLOCKS, ring)


def moves_of(tokens: int, first: int, ids: Sequence[int]) -> list[Move]:
    """Of all groups: full attention from block `first` on. Takes its blocks from `ids`."""
    count = -(-tokens // BLOCK)
    start = max(0, tokens - WINDOW) // BLOCK
    full, window = tuple(ids[: count - first]), tuple(ids[count - first :][: count - start])
    state = ids[count - first + count - start]
    return [
        Move(0, first * BLOCK, count * BLOCK, full),
        Move(1, start * BLOCK, count * BLOCK, window),
        Move(2, 0, tokens, (state,)),
    ]


@settings(max_examples=40)
@given(st.data())
def test_layers_together_are_the_layers_one_by_one(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 4))
    shards = data.draw(st.sampled_from([1, 2]))
    layout = native(layers, shards, data.draw(st.integers(0, shards - 1)))
    order = data.draw(st.sampled_from(["HND", "NHD", "kernel blocks"]))
    tokens = data.draw(st.integers(1, 9 * BLOCK))
    first = data.draw(st.integers(0, (tokens - 1) // BLOCK))
    pins = data.draw(st.sampled_from([None, HostPins()]))
    ring_bytes = data.draw(st.sampled_from([1 << 13, 1 << 15, 1 << 18]))
    ring = StagingRing("cpu", ring_bytes=ring_bytes, pins=pins, timeout_s=5)
    page = data.draw(st.sampled_from([256, 1000, 1 << 14]))
    caches, twin = Caches(layers, order, 1), Caches(layers, order, 1)
    kvds = [Kvd(layout.spec, BLOCK, tokens, page) for _ in range(2)]
    joint = copies_of(layout, caches, ring).joint
    assert joint is not None
    joint.warm_up()
    assert caches.content() == twin.content()
    single = copies_of(layout, twin, None)
    assert single.joint is None
    lease, judge = (kvd.join_write(kvd.ticket) for kvd in kvds)
    ids = data.draw(st.permutations(range(1, BLOCKS)))
    for move in moves_of(tokens, first, ids):
        segments = layout.segments(move)
        rows = dict.fromkeys((name for name, _ in segments), 0)
        for staged in joint.stage(move, segments):
            staged.begin(lease.joint_buffers)
            assert staged.piece.end() == len(staged.segments) * (
                staged.piece.piece.rows // len(staged.segments) * joint.row_bytes(segments[0][0])
            )
            for name, segment in segments:
                if segment.layer in {one.layer for one in staged.segments}:
                    rows[name] += staged.piece.piece.rows // len(staged.segments)
        assert rows == {name: joint.rows(name, move) for name, _ in segments}
        for name, segment in segments:
            single.by_layer[name].save(move, judge.buffers(segment))
    assert bytes(kvds[0].memory) == bytes(kvds[1].memory)
    caches.spoil()
    twin.spoil()
    view, judged = (kvd.join_read(kvd.ticket) for kvd in kvds)
    for move in moves_of(tokens, first, ids[::-1]):
        segments = layout.segments(move)
        copied = joint.load(move, segments, view.joint_views)
        expected = [single.by_layer[name].load(move, judged.views(s)) for name, s in segments]
        assert copied == sum(expected)
    joint.queued_loads()()
    assert caches.content() == twin.content()  # and no other byte has changed
    ring.release(ring.allocate(ring_bytes))  # all staging is free


def test_a_move_that_divides_a_block_is_refused() -> None:
    layout, caches = native(1), Caches(1, "HND", 1)
    joint = copies_of(layout, caches, StagingRing("cpu", ring_bytes=1 << 15)).joint
    assert joint is not None
    move = Move(0, 0, BLOCK + 1, (1, 2))
    with pytest.raises(EngineError, match="not whole rows of 16 tokens"):
        list(joint.stage(move, layout.segments(move)))


# A worker ---------------------------------------------------------------------------------------


TOKENS = 6 * BLOCK + 5


class Worker:
    def __init__(self, ring: StagingRing | None) -> None:
        self.layout, self.caches = native(3), Caches(3, "NHD", 2)
        self.kvd = Kvd(self.layout.spec, BLOCK, TOKENS)
        self.side = WorkerSide(self.kvd, self.layout)  # type: ignore[arg-type]
        self.side.set_copies(copies_of(self.layout, self.caches, ring))

    def orders(self, moves: Sequence[Move], *, last: bool = False) -> StepOrders:
        return StepOrders(saves=[SaveOrder("r", self.kvd.ticket, tuple(moves), last, "native")])

    def save(self) -> None:
        """Two steps; the second one has windows and states."""
        full, window, state = moves_of(TOKENS, 0, range(1, BLOCKS))
        half = Move(0, 0, 3 * BLOCK, full.block_ids[:3])
        rest = Move(0, 3 * BLOCK, full.stop, full.block_ids[3:])
        for orders in (self.orders([half]), self.orders([rest, window, state], last=True)):
            self.side.begin_step(orders)
            for name in self.caches.by_layer:
                if not name.startswith("state"):  # linear layers have no hook
                    self.side.save_layer(name)
            self.side.end_step()
            for storage in self.caches.storages:  # blocks have other owners in the next step
                storage[list(half.block_ids)] = 0xA5

    def load(self) -> None:
        moves = tuple(moves_of(TOKENS, 0, range(BLOCKS - 1, 0, -1)))
        orders = StepOrders(loads=[LoadOrder("r", self.kvd.ticket, moves, "native")])
        self.side.start_loads(orders)
        wait_until(lambda: "r" in self.side.take_results(set()).loaded)


def ready(worker: Worker) -> set[tuple[str, int, int, int]]:
    return {(s.group, s.layer, s.start, s.stop) for s in worker.kvd.ready_segments}


def test_a_staged_worker_does_what_a_worker_on_a_cpu_does() -> None:
    pins = HostPins()
    ring = StagingRing("cpu", ring_bytes=1 << 16, pins=pins, timeout_s=5)
    worker, judge = Worker(ring), Worker(None)
    for one in (worker, judge):
        one.save()
    assert bytes(worker.kvd.memory) == bytes(judge.kvd.memory)
    assert ready(worker) == ready(judge)
    assert worker.kvd.flushed == judge.kvd.flushed == [12]  # all were ready before the flush
    for one in (worker, judge):
        one.caches.spoil()
        one.load()
    assert worker.caches.content() == judge.caches.content()
    assert worker.side.take_counts() == judge.side.take_counts()
    assert pins.registered
    for one in (worker, judge):
        one.side.close()
    assert not pins.registered
    ring.release(ring.allocate(1 << 16))


@pytest.mark.parametrize("form", ["canonical", "native"])
def test_an_end_is_confirmed_after_the_copies_of_every_form(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both forms' workers have one staging. The order to end a request does not name the form in
    which it was saved."""
    ring = StagingRing("cpu", ring_bytes=1 << 16, timeout_s=5)
    sides = {
        name: Worker(StagingRing(ring.memory, pins=HostPins())) for name in ("canonical", "native")
    }
    by_form = {name: worker.side for name, worker in sides.items()}
    forms = WorkerForms(by_form, threading.Event())  # type: ignore[arg-type]
    worker = sides[form]
    for one in sides.values():
        assert one.side._saves is not None
        one.side._saves._timeout_s = 0.05
    release = hold_copies(monkeypatch)
    worker.side.begin_step(worker.orders([Move(0, 0, BLOCK, (3,))]))
    worker.side.end_step()
    forms.begin_step(StepOrders(ended=["r"], failed=["other"]))
    forms.start_loads(StepOrders(failed=["other"]))
    for _ in range(2):
        with pytest.raises(EngineError, match="have not ended"):
            forms.take_results({"r"})
    release.set()
    worker.side._saves._timeout_s = 20  # type: ignore[union-attr]
    results = forms.take_results({"r"})
    assert results.ended == {"r"}
    assert results.loaded == results.failed == {"other"}  # nothing was lost on the way
    assert len(worker.kvd.ready_segments) == 3
    threads = threading.active_count()
    forms.close()
    assert threading.active_count() < threads


def test_all_forms_share_one_staging_on_a_gpu_and_have_none_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def form(name: str) -> Any:
        def copies(tensors: Mapping[str, torch.Tensor], ring: StagingRing | None) -> LayerCopies:
            seen.append(ring)
            return LayerCopies({})

        return SimpleNamespace(compat=SimpleNamespace(form=name), copies=copies)

    both = [form("canonical"), form("native")]
    assert list(make_copies(both, {"a": torch.zeros(1)})) == ["canonical", "native"]
    assert seen == [None, None]
    seen.clear()
    made: list[StagingMemory] = []

    def memory_of(device: torch.device, nbytes: int) -> StagingMemory:
        assert device == torch.device("cuda", 1)
        made.append(StagingMemory("cpu", 1 << 14))
        return made[-1]

    monkeypatch.setattr(forms_module, "StagingMemory", memory_of)
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 1))
    for some in (both, both[1:]):
        make_copies(some, {"a": tensor, "b": tensor})
    assert len(made) == 2  # one each time
    assert [ring.memory is made[0] for ring in seen] == [True, True, False]
    assert len({id(ring._pins) for ring in seen}) == 3
    assert None not in [ring._pins for ring in seen]
