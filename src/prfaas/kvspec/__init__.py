"""What a model's KV consists of, how many bytes it is, and how it is cut into segments."""

from prfaas.kvspec.geometry import GQA, MLA, Geometry, Linear, WindowedGQA, build_spec
from prfaas.kvspec.groups import FullAttention, Group, KVSpec, LinearState, SlidingWindow
from prfaas.kvspec.segments import (
    BlockSlice,
    Segment,
    SegmentSink,
    SegmentSource,
    block_bytes,
    block_slices,
    handoff_segments,
    segment_bytes,
)

__all__ = [
    "GQA",
    "MLA",
    "BlockSlice",
    "FullAttention",
    "Geometry",
    "Group",
    "KVSpec",
    "Linear",
    "LinearState",
    "Segment",
    "SegmentSink",
    "SegmentSource",
    "SlidingWindow",
    "WindowedGQA",
    "block_bytes",
    "block_slices",
    "build_spec",
    "handoff_segments",
    "segment_bytes",
]
