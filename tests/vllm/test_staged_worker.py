"""A worker that copies layers together, as on a GPU, on a CPU: staging without streams.

What it writes and reads is what a worker does that copies each layer for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from prfaas.device import StagingRing
from prfaas.errors import EngineError
from prfaas.integrations.canonical import (
    AttentionConverter,
    AttentionForm,
    StateConverter,
    StateForm,
)
from prfaas.integrations.vllm.caches.canonical_copies import AttentionCopy, StateCopy
from prfaas.integrations.vllm.caches.groups import CacheGroup, CacheLayout, Move
from prfaas.integrations.vllm.caches.joint_copies import CopiedLayer, JointCopies
from prfaas.integrations.vllm.caches.layer_copies import LayerCopies
from prfaas.integrations.vllm.steps import (
    BoundaryOrder,
    KeepOrder,
    LoadOrder,
    SaveOrder,
    StepOrders,
)
from prfaas.integrations.vllm.worker_side import WorkerSide
from prfaas.kvd.engine_socket.messages import SegmentName
from prfaas.kvspec import GQA, Linear, build_spec
from prfaas.kvspec.parts import layer_parts
from prfaas.types import CANONICAL
from tests.vllm.fake_kvd import HostPins, Kvd
from tests.waiting import wait_until

WIRE, BLOCK, TOKENS = 8, 6, 45
ATTENTION = GQA((0, 2, 3), 4, 8, 8)
STATES = Linear((1, 4), 2, 2, 4, 4, 1)  # without a convolution
SPEC = build_spec([ATTENTION, STATES], kv_dtype="float32", state_dtype="float32")


class Worker:
    def __init__(self, ring: StagingRing | None, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kvd = Kvd(SPEC, WIRE, TOKENS)
        parts = layer_parts(ATTENTION, kv_dtype="float32", state_dtype="float32")
        form = AttentionForm("content", (parts[0], parts[1]), range(4))
        state_parts = layer_parts(STATES, kv_dtype="float32", state_dtype="float32")
        state_form = StateForm(tuple(state_parts), range(2), transposed=True)
        copies: dict[str, Any] = {}
        joint: dict[str, CopiedLayer] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for number in ATTENTION.layers:
            name = f"attn.{number}"
            cache = torch.randn(20, 4, BLOCK, 16, generator=generator)
            converter = AttentionConverter(cache, 20, form, ring)
            copies[name] = AttentionCopy(converter, range(4), writes=True)
            joint[name] = CopiedLayer(converter.rows, converter.rows, row_tokens=1)
            self.tensors[name] = cache
        for number in STATES.layers:
            name = f"linear.{number}"
            ssm = torch.randn(6, 2, 4, 4, generator=generator)
            state = StateConverter(None, ssm, state_form, ring)
            copies[name] = StateCopy(state, range(2))
            joint[name] = CopiedLayer(state.rows_written, state.rows_held, row_tokens=None)
            self.tensors[name] = ssm
        groups = (
            CacheGroup(
                0, "full", SPEC.groups[0], BLOCK, tuple((f"attn.{n}", n) for n in ATTENTION.layers)
            ),
            CacheGroup(
                1, "state", SPEC.groups[1], 64, tuple((f"linear.{n}", n) for n in STATES.layers)
            ),
        )
        layout = CacheLayout(groups, SPEC, WIRE, whole=1)
        self.side = WorkerSide(self.kvd, layout, keeps_answers=True, slots=2)  # type: ignore[arg-type]
        made = None if ring is None else JointCopies(ring, joint, WIRE)
        self.side.set_copies(LayerCopies(copies, joint=made))

    def step(self, moves: Sequence[Move], *, last: bool, first: bool) -> None:
        ticket = self.kvd.ticket if first else None
        self.side.begin_step(
            StepOrders(saves=[SaveOrder("r", ticket, tuple(moves), last, CANONICAL)])
        )
        for number in ATTENTION.layers:
            self.side.save_layer(f"attn.{number}")
        self.side.end_step()

    def save(self) -> None:
        """Two steps; the second one has the state."""
        self.step([Move(0, 0, 20, tuple(range(1, 5)))], last=False, first=True)
        for number in ATTENTION.layers:  # blocks that a window has given up have other owners
            self.tensors[f"attn.{number}"][1:4] = float("nan")
        ids = tuple(range(4, 9))
        self.step([Move(0, 20, TOKENS, ids), Move(1, 0, TOKENS, (3,))], last=True, first=False)

    def keep(self, *, copied_tokens: int = TOKENS) -> None:
        """The same tokens as an answer: the state is copied when it is there, and then lost."""
        state = Move(1, 0, TOKENS, (3,))
        copied = state._replace(stop=copied_tokens)
        self.side.begin_step(StepOrders(boundaries=[BoundaryOrder(1, (copied,), CANONICAL)]))
        self.side.end_step()
        for number in STATES.layers:
            self.tensors[f"linear.{number}"][3] = float("nan")
        attention = Move(0, 0, TOKENS, tuple(range(1, 9)))
        order = KeepOrder("r", self.kvd.ticket, (attention,), 1, (state,), CANONICAL)
        self.side.begin_step(StepOrders(keeps=[order]))
        self.side.end_step()

    def load(self) -> None:
        moves = (Move(0, 0, TOKENS, tuple(range(19, 11, -1))), Move(1, 0, TOKENS, (5,)))
        self.side.start_loads(StepOrders(loads=[LoadOrder("r", self.kvd.ticket, moves, CANONICAL)]))


def loaded(worker: Worker) -> set[str]:
    found: set[str] = set()

    def done() -> bool:
        results = worker.side.take_results(set())
        found.update(results.failed)
        return "r" in results.loaded

    wait_until(done)
    return found


@pytest.fixture
def pins() -> HostPins:
    return HostPins()


@pytest.fixture
def worker(pins: HostPins) -> Iterator[Worker]:
    ring = StagingRing("cpu", ring_bytes=1 << 17, pins=pins, timeout_s=5)
    made = Worker(ring, seed=1)
    yield made
    made.side.close()
    assert pins.registered == set()  # given back
    ring.release(ring.allocate(1 << 17))  # all staging is free


def names(segments: Sequence[SegmentName]) -> set[tuple[str, int, int, int]]:
    return {(s.group, s.layer, s.start, s.stop) for s in segments}


def test_pages_are_those_of_a_worker_that_copies_each_layer(worker: Worker, pins: HostPins) -> None:
    judge = Worker(None, seed=1)
    for one in (worker, judge):
        one.save()
    assert bytes(worker.kvd.memory) == bytes(judge.kvd.memory)
    assert names(worker.kvd.ready_segments) == names(judge.kvd.ready_segments)
    assert worker.kvd.flushed == judge.kvd.flushed == [8]  # all were ready before the flush
    assert worker.side.take_counts() == judge.side.take_counts()
    assert pins.registered
    for one in (worker, judge):
        for tensor in one.tensors.values():
            tensor.fill_(float("nan"))
        one.load()
        assert loaded(one) == set()
    for name, tensor in worker.tensors.items():
        assert torch.equal(tensor.nan_to_num(7.0), judge.tensors[name].nan_to_num(7.0))
    assert worker.side.take_counts() == judge.side.take_counts()
    judge.side.close()


@pytest.mark.parametrize("staged", [True, False])
def test_an_answer_is_written_from_blocks_and_from_its_slot(worker: Worker, staged: bool) -> None:
    judge, made = Worker(None, seed=1), worker if staged else Worker(None, seed=1)
    judge.save()
    made.keep()
    wait_until(lambda: "r" in made.side.take_results(set()).ended)
    assert bytes(made.kvd.memory) == bytes(judge.kvd.memory)
    assert {s.layer for s in made.kvd.ready_segments} == {s.layer for s in judge.kvd.ready_segments}
    assert made.kvd.flushed == [5]  # all were ready before the flush
    judge.side.close()
    if not staged:
        made.side.close()


def test_an_answer_ends_when_the_device_has_written_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = hold_copies(monkeypatch)
    worker.keep()
    assert worker.side.take_results(set()).ended == set()
    release.set()
    wait_until(lambda: "r" in worker.side.take_results(set()).ended)
    assert worker.kvd.flushed == [5]


def test_another_state_than_that_of_the_answer_is_not_written(worker: Worker) -> None:
    worker.keep(copied_tokens=TOKENS - 1)
    wait_until(lambda: "r" in worker.side.take_results(set()).ended)
    assert {s.group for s in worker.kvd.ready_segments} == {SPEC.groups[0].name}


def hold_copies(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The device ends no copy before the event is set."""
    release = threading.Event()
    original = StagingRing.end_write

    def slow(ring: StagingRing, chunk: Any) -> int:
        assert release.wait(20)
        return original(ring, chunk)

    monkeypatch.setattr(StagingRing, "end_write", slow)
    return release


def test_a_step_without_a_last_token_does_not_wait_for_the_device(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies of an aborted request have ended when its end is confirmed."""
    release = hold_copies(monkeypatch)
    worker.step([Move(0, 0, 20, tuple(range(1, 5)))], last=False, first=True)
    assert worker.kvd.ready_segments == []
    worker.side.begin_step(StepOrders(ended=["r"]))
    threading.Timer(0.05, release.set).start()
    assert worker.side.take_results({"r"}).ended == {"r"}
    assert len(worker.kvd.ready_segments) == 3


def test_an_end_is_confirmed_later_when_copies_hang(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = hold_copies(monkeypatch)
    assert worker.side._saves is not None
    worker.side._saves._timeout_s = 0.05
    worker.step([Move(0, 0, 20, tuple(range(1, 5)))], last=False, first=True)
    worker.side.begin_step(StepOrders(ended=["r"]))
    for _ in range(2):  # it is not forgotten
        with pytest.raises(EngineError, match="have not ended"):
            worker.side.take_results({"r"})
    release.set()
    worker.side._saves._timeout_s = 20
    assert worker.side.take_results({"r"}).ended == {"r"}


def test_a_step_that_was_given_up_is_not_saved_by_the_next_one(worker: Worker) -> None:
    move = Move(0, 0, 4, (1,))
    orders = StepOrders(saves=[SaveOrder("r", worker.kvd.ticket, (move,), False, CANONICAL)])
    worker.side.begin_step(orders)
    worker.side.save_layer("attn.0")  # too little for a launch
    worker.side.begin_step(StepOrders())
    worker.side.end_step()
    worker.side._saves.wait()  # type: ignore[union-attr]
    assert worker.kvd.ready_segments == []


def test_a_copy_that_fails_leaves_its_segments_alone_missing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = StagingRing.begin_write

    def broken(ring: StagingRing, chunk: Any, pages: Any) -> Any:
        if chunk.rows == 2:  # the two states
            ring.drop(chunk)
            raise EngineError("CUDA refused")
        return original(ring, chunk, pages)

    monkeypatch.setattr(StagingRing, "begin_write", broken)
    worker.save()
    assert {s.group for s in worker.kvd.ready_segments} == {SPEC.groups[0].name}
    assert worker.kvd.flushed == [6]


def test_a_load_that_fails_is_reported_after_what_was_queued(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.save()
    waited: list[bool] = []
    original = JointCopies.queued_loads

    def noted(copies: JointCopies) -> Any:
        wait = original(copies)
        return lambda: (waited.append(True), wait())

    monkeypatch.setattr(JointCopies, "queued_loads", noted)
    wrong = (Move(0, 0, TOKENS, tuple(range(19, 11, -1))), Move(1, 0, TOKENS, (99,)))
    worker.side.start_loads(StepOrders(loads=[LoadOrder("r", worker.kvd.ticket, wrong, CANONICAL)]))
    assert loaded(worker) == {"r"}
    assert waited == [True]
