"""What each layer of a model caches, read off a one-token forward pass: the shapes that convert
canonical bytes into tensors and back.

The forward pass decides rather than the config, because only the model's code has the details: MLA
keeps latents as "keys", a convolution keeps some number of columns. `kvspec` must give the same
bytes for the config, or the model is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionLayer,
)

from prfaas.errors import InputError
from prfaas.kvspec import Group, KVSpec, LinearState, SlidingWindow

SUPPORTED = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
)


@dataclass(frozen=True, slots=True)
class TokenShape:
    """Attention, per token: keys [k_heads, k_dim] and values [v_heads, v_dim]. For MLA the "keys"
    are the latent and the "values" are the rope part."""

    k_heads: int
    k_dim: int
    v_heads: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class StateShape:
    """A recurrent state and the convolution's columns, of which the oldest is never read again.

    States are transferred in the spec's dtype, whatever dtype the layer keeps them in.
    """

    state: tuple[int, ...]
    kept_dtype: torch.dtype
    wire_dtype: torch.dtype
    conv_channels: int
    conv_columns: int
    conv_dtype: torch.dtype

    @property
    def wire_bytes(self) -> int:
        conv_elements = self.conv_channels * (self.conv_columns - 1)
        state_bytes = math.prod(self.state) * self.wire_dtype.itemsize
        return state_bytes + conv_elements * self.conv_dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerShape:
    tokens: TokenShape | None = None
    window: int | None = None  # tokens attended to, the current one included; None: all
    state: StateShape | None = None


def layer_shapes(
    model: Any, spec: KVSpec, state_dtype: torch.dtype, *, first_tokens: int = 0, where: str
) -> Mapping[int, LayerShape]:
    """Runs one token through the model. InputError when a layer's cache cannot be transferred.

    With `first_tokens`, as many tokens run before that one: a GPU's kernels are tuned by their
    first run, and one token would tune them badly.
    """
    cache = DynamicCache(config=model.config)
    _require_supported(cache, where)
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            if first_tokens:
                _run_first(model, first_tokens)
            model(token, past_key_values=cache, use_cache=True, position_ids=token)
    except (AttributeError, TypeError) as error:
        raise InputError(
            f"{model.config.model_type} keeps its state outside transformers' cache layers "
            f"({error})",
            file=where,
            fix="use a model whose cache DynamicCache(config) describes",
        ) from error
    shapes = {number: _shape(layer, state_dtype) for number, layer in enumerate(cache.layers)}
    _require_agreement(cache, shapes, spec, where)
    cached = {number: shape for number, shape in shapes.items() if shape != LayerShape()}
    windows = {shape.window for shape in cached.values() if shape.window is not None}
    if len(windows) > 1:
        raise InputError(
            f"the layers have windows of {sorted(windows)} tokens",
            file=where,
            fix="use a model with one window size: transformers masks all window layers alike",
        )
    return cached


def _run_first(model: Any, tokens: int) -> None:
    positions = torch.arange(tokens, device=model.device)[None]
    # Different tokens, because equal ones would all use the same experts.
    ids = positions % model.config.get_text_config().vocab_size
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache, use_cache=True, position_ids=positions, logits_to_keep=1)


def _require_supported(cache: DynamicCache, where: str) -> None:
    for number, layer in enumerate(cache.layers):
        # Exact types, because subclasses keep more (an indexer's keys, quantised pages).
        if type(layer) not in SUPPORTED or getattr(layer, "number_of_states", 1) != 1:
            known = ", ".join(kind.__name__ for kind in SUPPORTED)
            raise InputError(
                f"layer {number} caches in a {type(layer).__name__}, which cannot be exported",
                file=where,
                fix=f"supported cache layers: {known}",
            )


def _shape(layer: Any, state_dtype: torch.dtype) -> LayerShape:
    tokens = window = state = None
    if getattr(layer, "keys", None) is not None:
        tokens = TokenShape(
            layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[1], layer.values.shape[3]
        )
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
    if isinstance(layer, LinearAttentionLayer) and layer.recurrent_states[0] is not None:
        conv = layer.conv_states[0]
        state = StateShape(
            tuple(layer.recurrent_states[0].shape[1:]),
            kept_dtype=layer.recurrent_states[0].dtype,
            wire_dtype=state_dtype,
            conv_channels=0 if conv is None else conv.shape[1],
            conv_columns=1 if conv is None else conv.shape[2],
            conv_dtype=state_dtype if conv is None else conv.dtype,
        )
    return LayerShape(tokens, window, state)


def _require_agreement(
    cache: DynamicCache, shapes: Mapping[int, LayerShape], spec: KVSpec, where: str
) -> None:
    """Raises InputError unless the config, as `kvspec` reads it, and the model's code describe the
    same bytes."""
    expected: dict[tuple[str, int], int] = {
        (_kind(group), layer): group.layer_bytes(1)
        for group in spec.groups
        for layer in group.layers
    }
    found: dict[tuple[str, int], int] = {}
    for number, (layer, shape) in enumerate(zip(cache.layers, shapes.values(), strict=True)):
        if shape.tokens is not None:
            kind = "attention" if shape.window is None else f"window {shape.window}"
            found[kind, number] = layer.keys.nbytes + layer.values.nbytes
        if shape.state is not None:
            found["state", number] = shape.state.wire_bytes
    if found != expected:
        odd = sorted(set(found.items()) ^ set(expected.items()), key=lambda item: item[0][1])
        (kind, number), _ = odd[0]
        raise InputError(
            f"layer {number} ({kind}) caches {found.get((kind, number), 0)} bytes after one token, "
            f"the config states {expected.get((kind, number), 0)}",
            file=where,
            fix="this model is not supported; please report its config",
        )


def _kind(group: Group) -> str:
    if isinstance(group, LinearState):
        return "state"
    return f"window {group.window}" if isinstance(group, SlidingWindow) else "attention"
