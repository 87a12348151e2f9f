"""Fills a cache from bytes, and sets its length.

Linear layers do not store how many tokens they have seen, windows count that apart from the tokens
they hold, and a flag left unset makes a layer start from nothing without an error. So only this
file fills a cache, and it sets everything that a layer of each kind reads.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import DynamicSlidingWindowLayer

from prfaas.engine.api import Resume
from prfaas.engine.chunks import resume_segments
from prfaas.engine.hf import rows
from prfaas.engine.hf.exporter import ExportingCache
from prfaas.engine.hf.load import LoadedModel
from prfaas.engine.hf.shapes import StateShape
from prfaas.errors import EngineError
from prfaas.kvspec import LinearState, Segment, segment_bytes


def import_state(loaded: LoadedModel, cache: ExportingCache, resume: Resume) -> None:
    """Fills a fresh cache with the state after exactly `resume.tokens` tokens. EngineError when a
    segment is missing or has another size than this model's."""
    filled = 0
    for segment in resume_segments(loaded.spec, resume.tokens):
        layer, shape = cache.layers[segment.layer], loaded.shapes[segment.layer]
        if isinstance(loaded.spec[segment.group], LinearState):
            assert shape.state is not None
            _fill_state(layer, shape.state, _read(loaded, resume, segment, 1))
        else:
            assert shape.tokens is not None
            read = _read(loaded, resume, segment, segment.stop - segment.start)
            _fill_tokens(layer, *rows.as_tokens(read, shape.tokens, loaded.dtype), resume.tokens)
        filled += 1
    expected = sum(
        (shape.tokens is not None) + (shape.state is not None) for shape in loaded.shapes.values()
    )
    assert filled == expected, f"{filled} of {expected} layers were filled"


def _read(loaded: LoadedModel, resume: Resume, segment: Segment, count: int) -> torch.Tensor:
    width = segment_bytes(loaded.spec, segment) // count
    on_cuda = loaded.device.type == "cuda"
    try:
        views = resume.source.views(segment)
        host = rows.gather(views, count, width, pinned=on_cuda)
    except EngineError as error:
        raise EngineError(f"segment {segment.name}: {error}") from error
    return host.to(loaded.device, non_blocking=True) if on_cuda else host


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
