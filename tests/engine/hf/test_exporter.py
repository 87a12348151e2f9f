"""State leaves layer by layer while the forward goes on; pages may cut it anywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from prfaas.engine.api import EngineJob, Export, Sampling
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.engine.hf import HFEngine, LoadedModel, load_model
from prfaas.engine.memory import MemorySegments
from prfaas.kvspec import KVSpec, LinearState, Segment, segment_bytes
from prfaas_lab.testing.engine_runs import run
from tests.engine.hf import models

PREFILL_ONLY = Sampling(max_tokens=0)


class Watched(MemorySegments):
    """Notes when segments become ready, among what else is noted in `order`."""

    def __init__(self, spec: KVSpec, order: list[Any]) -> None:
        super().__init__(spec)
        self._order = order

    def ready(self, segment: Segment, heads: range | None = None) -> None:
        super().ready(segment, heads)
        self._order.append(segment)


def watched_prefill(loaded: LoadedModel, tokens: int, chunk_tokens: int) -> list[Any]:
    """("begin", layer) for every forward of a layer, "end" for every forward of the model, and
    segments as they become ready."""
    order: list[Any] = []
    hooks = [
        layer.register_forward_pre_hook(lambda *_, number=number: order.append(("begin", number)))
        for number, layer in enumerate(loaded.model.model.layers)
    ]
    hooks.append(loaded.model.register_forward_hook(lambda *_: order.append("end")))
    engine = HFEngine(loaded, chunk_tokens=chunk_tokens)
    try:
        sink = Watched(loaded.spec, order)
        prompt = [token % 256 for token in range(tokens)]
        run(engine, EngineJob("p", prompt, PREFILL_ONLY, export=Export(sink, tokens)))
    finally:
        engine.close()
        for hook in hooks:
            hook.remove()
    return order


def chunks_of(order: list[Any]) -> Iterator[list[Any]]:
    chunk: list[Any] = []
    for entry in order:
        chunk.append(entry)
        if entry == "end":
            yield chunk
            chunk = []
    assert not chunk, "segments after the last forward"


@pytest.mark.parametrize("arch", models.archs(models.ALL, "kimi-linear", "falcon-h1"))
def test_a_layers_piece_is_ready_before_the_layer_after_next_begins(arch: str) -> None:
    for chunk in chunks_of(watched_prefill(models.loaded(arch), 150, chunk_tokens=64)):
        begun = -1
        for entry in chunk:
            if isinstance(entry, Segment):
                assert begun <= entry.layer + 1, f"{entry.name} came in layer {begun}"
            elif entry != "end":
                begun = entry[1]


def test_most_of_the_last_chunk_has_left_by_the_end_of_its_forward(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "small", "kimi-linear", "small")
    loaded = load_model(tmp_path / "small")
    assert len(loaded.model.model.layers) >= 12
    *_, last = chunks_of(watched_prefill(loaded, 192, chunk_tokens=64))
    left = sum(segment_bytes(loaded.spec, s) for s in last if isinstance(s, Segment))
    linear = sum(
        len(group.layers) * group.state_bytes
        for group in loaded.spec.groups
        if isinstance(group, LinearState)
    )
    due = linear + loaded.spec.bytes_per_token * 64
    assert left >= 0.6 * due


@pytest.mark.parametrize("arch", models.archs(models.ALL, "kimi-linear", "falcon-h1"))
def test_checkpoints_are_the_states_a_prefill_of_that_length_leaves(arch: str) -> None:
    """A prompt of 150 tokens with states wanted after 64 and 128 as well."""
    spec, prompt = models.loaded(arch).spec, models.prompt(arch, 150)
    sink = MemorySegments(spec)
    export = Export(sink, 150, checkpoint_tokens=(64, 128))
    run(models.engine(arch, chunk_tokens=512), EngineJob("p", prompt, PREFILL_ONLY, export=export))
    for length in (64, 128):
        alone = MemorySegments(spec)
        job = EngineJob("q", prompt[:length], PREFILL_ONLY, export=Export(alone, length))
        run(models.engine(arch, chunk_tokens=64), job)
        for segment in alone.segments:
            expected = b"".join(alone.views(segment))
            assert b"".join(sink.views(segment)) == expected, segment.name


class Pages:
    """A sink whose buffers are cut every `size` bytes, whatever a token's size."""

    def __init__(self, spec: KVSpec, size: int) -> None:
        self._whole = MemorySegments(spec)
        self._size = size

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        (view,) = self._whole.buffers(segment)
        return [view[at : at + self._size] for at in range(0, view.nbytes, self._size)]

    def ready(self, segment: Segment, heads: range | None = None) -> None:
        self._whole.ready(segment, heads)

    def dump(self) -> dict[str, bytes]:
        return self._whole.dump()


@pytest.mark.parametrize("arch", ("kimi-linear", "falcon-h1"))
@pytest.mark.parametrize("page_bytes", (4096, 1000, 333))
def test_pages_may_cut_tokens_and_states(arch: str, page_bytes: int) -> None:
    spec, prompt = models.loaded(arch).spec, models.prompt(arch, 100)
    whole, pages = MemorySegments(spec), Pages(spec, page_bytes)
    for sink in (whole, pages):
        run(models.engine(arch), EngineJob("p", prompt, PREFILL_ONLY, export=Export(sink, 100)))
    assert pages.dump() == whole.dump()
