"""Fills a cache from bytes, and sets its length.

Linear layers do not store how many tokens they have seen, windows count that apart from the tokens
they hold, and a flag left unset makes a layer start from nothing without an error. So only this
file fills a cache, and it sets everything that a layer of each kind reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from prfaas.device import StagingRing
from prfaas.device.page_pins import Pages, nbytes_of
from prfaas.engine.api import Resume
from prfaas.engine.chunks import resume_segments
from prfaas.engine.hf import rows
from prfaas.engine.hf.exporter import ExportingCache
from prfaas.engine.hf.load import LoadedModel
from prfaas.engine.hf.shapes import StateShape
from prfaas.errors import EngineError
from prfaas.kvspec import LinearState, Segment, segment_bytes
from prfaas.kvspec.mapped import MappedSource


def import_state(
    loaded: LoadedModel, cache: ExportingCache, resume: Resume, ring: StagingRing | None = None
) -> None:
    """Fills a fresh cache with the state after exactly `resume.tokens` tokens. EngineError when a
    segment is missing or has another size than this model's. With staging, the device may still
    read the source's memory afterwards: the current stream waits for it, and so does
    `ring.finish_loads`."""
    segments = list(resume_segments(loaded.spec, resume.tokens))
    expected = sum(
        (shape.tokens is not None) + (shape.state is not None) for shape in loaded.shapes.values()
    )
    assert len(segments) == expected, f"{len(segments)} of {expected} layers would be filled"
    if ring is None:
        filled = [_gathered(loaded, resume, segment) for segment in segments]
    else:
        # All of them before the first copy begins: a copy waits for what was queued before.
        filled = [_empty(loaded, segment, ring.device) for segment in segments]
        ring.copy_to(_loads(resume, segments, filled))
    for segment, read in zip(segments, filled, strict=True):
        layer, shape = cache.layers[segment.layer], loaded.shapes[segment.layer]
        if isinstance(loaded.spec[segment.group], LinearState):
            assert shape.state is not None
            _fill_state(layer, shape.state, read)
        else:
            assert shape.tokens is not None
            _fill_tokens(layer, *rows.as_tokens(read, shape.tokens, loaded.dtype), resume.tokens)


def _loads(
    resume: Resume, segments: Sequence[Segment], targets: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, Pages]]:
    source = resume.source
    for segment, target in zip(segments, targets, strict=True):
        with _named(segment):
            pages: Pages
            if isinstance(source, MappedSource):
                pages = source.mapped_views(segment)
            else:
                pages = source.views(segment)
            found = nbytes_of(pages)
            if found != target.nbytes:
                raise EngineError(f"{found} bytes of state instead of {target.nbytes}")
        yield target, pages


def _empty(loaded: LoadedModel, segment: Segment, device: torch.device) -> torch.Tensor:
    count = _rows_of(loaded, segment)
    width = segment_bytes(loaded.spec, segment) // count
    return torch.empty((count, width), dtype=torch.uint8, device=device)


def _gathered(loaded: LoadedModel, resume: Resume, segment: Segment) -> torch.Tensor:
    count = _rows_of(loaded, segment)
    width = segment_bytes(loaded.spec, segment) // count
    with _named(segment):
        return rows.gather(resume.source.views(segment), count, width)


def _rows_of(loaded: LoadedModel, segment: Segment) -> int:
    linear = isinstance(loaded.spec[segment.group], LinearState)
    return 1 if linear else segment.stop - segment.start


@contextmanager
def _named(segment: Segment) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        raise EngineError(f"segment {segment.name}: {error}") from error


def _fill_tokens(layer: Any, keys: torch.Tensor, values: torch.Tensor, tokens: int) -> None:
    # `update` makes new keys and values and never writes in place, so views suffice.
    layer.dtype, layer.device = keys.dtype, keys.device
    layer.keys, layer.values = keys, values
    layer.is_initialized = True
    if isinstance(layer, DynamicSlidingWindowLayer):
        layer.cumulative_length = tokens  # of the whole past, not of the window


def _fill_state(layer: Any, shape: StateShape, row: torch.Tensor) -> None:
    state, conv = rows.as_state(row, shape)
    layer.recurrent_states[0] = state
    layer.is_recurrent_states_initialized[0] = True
    if conv is not None:
        layer.dtype, layer.device = conv.dtype, conv.device
        layer.conv_states[0] = conv
        layer.conv_kernel_size[0] = shape.conv_columns
        layer.is_conv_states_initialized[0] = True
    layer.has_previous_state[0] = True
