"""The state of an answer that has ended: copied from a row of the slots, written to a sink later.

While a sequence decodes, its attention stays in its row. Windows and linear states change with
every token, so `copy_boundary` packs them at each block boundary; the next boundary replaces them.
When the sequence ends, `take_answer` packs the attention that the caller lacks. Both run on the
engine's thread. `HFAnswer.write` runs on a thread of the caller, and on CUDA on a stream of its
own, so that running sequences do not wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch

from prfaas.engine.api import EngineJob
from prfaas.engine.chunks import resume_segments
from prfaas.engine.hf import rows
from prfaas.engine.hf.slots import SlotCache
from prfaas.kvspec import FullAttention, KVSpec, LinearState, Segment, SegmentSink, segment_bytes

_LOG = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 1 << 30  # a longer answer is not kept


class BoundaryCopy(NamedTuple):
    """Windows and states after exactly `tokens` tokens."""

    tokens: int
    parts: Mapping[Segment, torch.Tensor]


class HFAnswer:
    def __init__(self, spec: KVSpec, tokens: int, parts: Mapping[Segment, torch.Tensor]) -> None:
        self._spec = spec
        self._tokens = tokens
        self._parts = parts
        self._copied: torch.cuda.Event | None = None
        device = next(iter(parts.values())).device
        if device.type == "cuda":
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(device))

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self._parts.values())

    def write(self, sink: SegmentSink, skip_tokens: Mapping[str, int]) -> None:
        for segment, packed in self._parts.items():
            if isinstance(self._spec[segment.group], FullAttention):
                first = max(segment.start, skip_tokens.get(segment.group, 0))
                if first >= segment.stop:
                    continue
                packed = packed[first - segment.start :]
                segment = Segment(segment.group, segment.layer, first, segment.stop)
            rows.write((self._on_host(packed),), sink.buffers(segment))
            sink.ready(segment)

    def _on_host(self, packed: torch.Tensor) -> torch.Tensor:
        if self._copied is None:
            return packed
        stream = torch.cuda.Stream(packed.device)
        stream.wait_event(self._copied)
        with torch.cuda.stream(stream):
            host = packed.cpu()
        packed.record_stream(stream)
        return host


class KeptSequence(Protocol):
    """What is kept of a running sequence."""

    boundary: BoundaryCopy | None

    @property
    def job(self) -> EngineJob: ...

    @property
    def tokens(self) -> int: ...


def copy_boundary(
    spec: KVSpec, slots: SlotCache, row: int, sequence: KeptSequence, block_tokens: int
) -> None:
    """Packs windows and states when the row's length is a block boundary. Nothing happens for a
    sequence whose answer is not kept."""
    if sequence.job.keep is None or sequence.tokens % block_tokens:
        return
    sequence.boundary = None  # its memory can be used for the next one
    parts: dict[Segment, torch.Tensor] = {}
    try:
        for segment in resume_segments(spec, sequence.tokens):
            group, layer = spec[segment.group], slots.layers[segment.layer]
            if isinstance(group, LinearState):
                parts[segment] = rows.pack(layer.state_rows(row))
            elif not isinstance(group, FullAttention):
                parts[segment] = rows.pack(layer.token_rows(row, segment.start, segment.stop))
    except torch.OutOfMemoryError:
        return  # the answer is kept only if it passes another boundary
    sequence.boundary = BoundaryCopy(sequence.tokens, parts)


def take_answer(
    spec: KVSpec, slots: SlotCache, row: int, sequence: KeptSequence
) -> HFAnswer | None:
    """None when there is nothing to keep, or too much."""
    keep, boundary = sequence.job.keep, sequence.boundary
    if keep is None or boundary is None or boundary.tokens <= keep.held_tokens:
        return None
    first, last = keep.held_tokens, boundary.tokens
    segments = [
        Segment(segment.group, segment.layer, first, last)
        for segment in resume_segments(spec, last)
        if isinstance(spec[segment.group], FullAttention)
    ]
    if sum(segment_bytes(spec, segment) for segment in segments) > MAX_ANSWER_BYTES:
        return None
    try:
        parts = {
            segment: rows.pack(slots.layers[segment.layer].token_rows(row, first, last))
            for segment in segments
        }
    except torch.OutOfMemoryError:
        _LOG.warning("the device has too little memory to keep an answer")
        return None
    return HFAnswer(spec, last, {**parts, **boundary.parts})
