"""A model's KV: its groups, their bytes, and the segments in which it is transferred."""

from prfaas.kvspec.geometry import GQA, MLA, Geometry, Linear, WindowedGQA, build_spec
from prfaas.kvspec.groups import FullAttention, Group, KVSpec, LinearState, SlidingWindow
from prfaas.kvspec.parts import Part, PartRole, layer_parts
from prfaas.kvspec.segments import (
    BlockSlice,
    Segment,
    SegmentShare,
    SegmentSink,
    SegmentSource,
    all_heads,
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
    "Part",
    "PartRole",
    "Segment",
    "SegmentShare",
    "SegmentSink",
    "SegmentSource",
    "SlidingWindow",
    "WindowedGQA",
    "all_heads",
    "block_bytes",
    "block_slices",
    "build_spec",
    "handoff_segments",
    "layer_parts",
    "segment_bytes",
]
