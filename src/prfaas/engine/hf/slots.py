"""Continuous batched decode: a cache whose rows hold sequences of different lengths.

Row r of every layer belongs to one sequence; rows 0 .. n-1 are in use. Each step writes one token
per row at the row's own position and attends over all rows at once, under a mask of lengths:

    full attention   [rows, heads, capacity, dim]   token p at column p
    window           [rows, heads, window, dim]     a ring: token p at column p mod window
                                                    (rope is applied before caching: order is free)
    linear state     [rows, ...]                    updated in place

A sequence joins when its prefill's cache is copied into the next row. When it leaves, the last row
moves into its place. Capacity and rows grow on demand and shrink when no sequence runs. The layers
subclass transformers' classes, so that models find the attributes they expect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from prfaas.engine.hf.rows import Rows, state_rows, token_rows
from prfaas.engine.hf.shapes import LayerShape, StateShape, TokenShape

CAPACITY_STEP = 256  # tokens; trades a little memory for fewer reallocations


class _TokenRows:
    """Keys and values [rows, heads, columns, dim], grown by copying."""

    def __init__(self, shape: TokenShape, like: torch.Tensor) -> None:
        self._shape = shape
        self._like = like
        self.keys = self.values = like.new_empty(0)
        self.resize(0, 0)

    def resize(self, rows: int, columns: int) -> None:
        shape, old = self._shape, (self.keys, self.values)
        sizes = ((shape.k_heads, shape.k_dim), (shape.v_heads, shape.v_dim))
        self.keys, self.values = (
            # Zeros, because a masked column still takes part in a product, and 0 * nan is nan.
            self._like.new_zeros((rows, heads, columns, dim))
            for heads, dim in sizes
        )
        for new, before in zip((self.keys, self.values), old, strict=True):
            if before.numel() and new.numel():
                kept = min(len(before), rows), min(before.shape[2], columns)
                new[: kept[0], :, : kept[1]] = before[: kept[0], :, : kept[1]]

    def put(self, row: int, columns: Any, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys[row, :, columns] = keys
        self.values[row, :, columns] = values

    def move(self, source: int, target: int) -> None:
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]

    def swap(self, one: int, other: int, columns: int) -> None:
        """The first columns; the others are not in use."""
        _swap_rows(self.keys[:, :, :columns], one, other)
        _swap_rows(self.values[:, :, :columns], one, other)


class _Step:
    """The positions of this step's tokens: made once per step, shared by all layers."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.count = len(lengths)
        self.longest = max(lengths) + 1  # columns in use once this step's token is written
        self.positions = torch.tensor(lengths, device=device)
        self.rows = torch.arange(self.count, device=device)


class FullSlots(DynamicLayer):
    def __init__(self, shape: TokenShape, like: torch.Tensor) -> None:
        super().__init__()
        self.store = _TokenRows(shape, like)
        self.is_initialized = True

    def resize(self, rows: int, capacity: int) -> None:
        self.store.resize(rows, capacity)

    def join(self, row: int, layer: Any, tokens: int) -> None:
        self.store.put(row, slice(tokens), layer.keys[0], layer.values[0])

    def move(self, source: int, target: int) -> None:
        self.store.move(source, target)

    def swap(self, one: int, other: int, tokens: int) -> None:
        self.store.swap(one, other, tokens)

    def token_rows(self, row: int, first: int, last: int) -> Rows:
        """Tokens [first, last) of a row. Views."""
        at = slice(row, row + 1), slice(None), slice(first, last)
        return token_rows(self.store.keys[at], self.store.values[at])

    def begin(self, step: _Step) -> None:
        self._step = step

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step, store = self._step, self.store
        store.keys[step.rows, :, step.positions] = key_states[:, :, 0]
        store.values[step.rows, :, step.positions] = value_states[:, :, 0]
        rows, columns = slice(step.count), slice(step.longest)
        return store.keys[rows, :, columns], store.values[rows, :, columns]

    def get_seq_length(self) -> int:
        return self._step.longest - 1


class WindowSlots(DynamicSlidingWindowLayer):
    def __init__(self, shape: TokenShape, window: int, like: torch.Tensor) -> None:
        super().__init__(sliding_window=window)
        self.store = _TokenRows(shape, like)
        self.is_initialized = True

    def resize(self, rows: int, capacity: int) -> None:
        self.store.resize(rows, self.sliding_window)

    def join(self, row: int, layer: Any, tokens: int) -> None:
        kept = layer.keys.shape[2]
        columns = torch.arange(tokens - kept, tokens, device=layer.keys.device)
        ring = columns % self.sliding_window
        self.store.keys[row][:, ring] = layer.keys[0]
        self.store.values[row][:, ring] = layer.values[0]

    def move(self, source: int, target: int) -> None:
        self.store.move(source, target)

    def swap(self, one: int, other: int, tokens: int) -> None:
        self.store.swap(one, other, self.sliding_window)

    def token_rows(self, row: int, first: int, last: int) -> Rows:
        """Tokens [first, last) of a row, which the ring still has. Copies."""
        ring = torch.arange(first, last, device=self.store.keys.device) % self.sliding_window
        return token_rows(
            self.store.keys[row : row + 1, :, ring], self.store.values[row : row + 1, :, ring]
        )

    def begin(self, step: _Step) -> None:
        self._step = step
        self._ring = step.positions % self.sliding_window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        step, store = self._step, self.store
        store.keys[step.rows, :, self._ring] = key_states[:, :, 0]
        store.values[step.rows, :, self._ring] = value_states[:, :, 0]
        rows, columns = slice(step.count), slice(min(step.longest, self.sliding_window))
        return store.keys[rows, :, columns], store.values[rows, :, columns]

    def get_seq_length(self) -> int:
        return self._step.longest - 1


class LinearSlots(LinearAttentionLayer):
    def __init__(self, shape: StateShape, like: torch.Tensor) -> None:
        super().__init__()
        self._state_shape = shape
        self._state = like.new_zeros((0, *shape.state), dtype=shape.kept_dtype)
        self._conv = like.new_zeros(
            (0, shape.conv_channels, shape.conv_columns), dtype=shape.conv_dtype
        )
        self.dtype, self.device = shape.conv_dtype, like.device
        self.conv_kernel_size[0] = shape.conv_columns
        self.is_conv_states_initialized[0] = self.is_recurrent_states_initialized[0] = True
        self.has_previous_state[0] = True

    def resize(self, rows: int, capacity: int) -> None:
        self._state = _with_rows(self._state, rows)
        self._conv = _with_rows(self._conv, rows)

    def join(self, row: int, layer: Any, tokens: int) -> None:
        self._state[row] = layer.recurrent_states[0][0]
        if self._state_shape.conv_channels:
            self._conv[row] = layer.conv_states[0][0]

    def move(self, source: int, target: int) -> None:
        self._state[target] = self._state[source]
        self._conv[target] = self._conv[source]

    def swap(self, one: int, other: int, tokens: int) -> None:
        _swap_rows(self._state, one, other)
        _swap_rows(self._conv, one, other)

    def state_rows(self, row: int) -> Rows:
        """The state of a row now."""
        return state_rows(self._state[row : row + 1], self._conv[row : row + 1], self._state_shape)

    def begin(self, step: _Step) -> None:
        # Views, so that the models' updates in place change the rows.
        self.recurrent_states[0] = self._state[: step.count]
        self.conv_states[0] = self._conv[: step.count]


class HybridSlots(LinearSlots, FullSlots):
    """Attention and a state in one layer (Falcon-H1)."""

    def __init__(self, shape: LayerShape, like: torch.Tensor) -> None:
        assert shape.tokens is not None and shape.state is not None
        FullSlots.__init__(self, shape.tokens, like)
        LinearSlots.__init__(self, shape.state, like)

    def resize(self, rows: int, capacity: int) -> None:
        FullSlots.resize(self, rows, capacity)
        LinearSlots.resize(self, rows, capacity)

    def join(self, row: int, layer: Any, tokens: int) -> None:
        FullSlots.join(self, row, layer, tokens)
        LinearSlots.join(self, row, layer, tokens)

    def move(self, source: int, target: int) -> None:
        FullSlots.move(self, source, target)
        LinearSlots.move(self, source, target)

    def swap(self, one: int, other: int, tokens: int) -> None:
        FullSlots.swap(self, one, other, tokens)
        LinearSlots.swap(self, one, other, tokens)

    def begin(self, step: _Step) -> None:
        FullSlots.begin(self, step)
        LinearSlots.begin(self, step)


class _Nothing(LinearAttentionLayer):
    """A layer without a cache (an MLP only)."""

    def resize(self, rows: int, capacity: int) -> None: ...
    def join(self, row: int, layer: Any, tokens: int) -> None: ...
    def move(self, source: int, target: int) -> None: ...
    def swap(self, one: int, other: int, tokens: int) -> None: ...
    def begin(self, step: _Step) -> None: ...


class SlotCache(Cache):
    layers: list[Any]

    def __init__(
        self,
        shapes: Mapping[int, LayerShape],
        layers: int,
        like: torch.Tensor,
        *,
        additive_masks: bool,
    ) -> None:
        """`like` has the device and the dtype of keys and values. Masks are booleans, or are added
        to the scores when the model uses transformers' eager attention."""
        super().__init__(layers=[_slots(shapes.get(n, LayerShape()), like) for n in range(layers)])
        attention = {shape.window for shape in shapes.values() if shape.tokens is not None}
        self._has_full = None in attention
        self._window = next((window for window in attention if window is not None), None)
        self._additive = additive_masks
        self._device, self._dtype = like.device, like.dtype
        self._rows = self._capacity = 0

    def join(self, row: int, cache: Cache, tokens: int, capacity: int) -> None:
        """Copies a sequence of `tokens` tokens into `row`, with room to grow to `capacity`."""
        self._reserve(row + 1, capacity)
        for slots, layer in zip(self.layers, cache.layers, strict=True):
            slots.join(row, layer, tokens)

    def leave(self, row: int, last: int) -> None:
        """Removes `row`: the highest row in use, `last`, moves into its place."""
        if row != last:
            for slots in self.layers:
                slots.move(last, row)
        if last == 0:
            self.clear()

    def swap(self, one: int, other: int, tokens: int) -> None:
        """Of rows with at most so many tokens. After an error no row may be used: some layers have
        traded places, and others have not."""
        if one != other:
            for slots in self.layers:
                slots.swap(one, other, tokens)

    def clear(self) -> None:
        """Removes all rows."""
        self._resize(0, 0)

    def begin(self, lengths: Sequence[int]) -> dict[str, Any]:
        """Prepares a step of the first rows. `lengths` are their lengths without this step's token.
        Returns the arguments of the forward pass besides the tokens."""
        step = _Step(lengths, self._device)
        for slots in self.layers:
            slots.begin(step)
        return {
            "past_key_values": self,
            "position_ids": step.positions[:, None],
            "attention_mask": self._masks(step),
        }

    def _masks(self, step: _Step) -> Any:
        """One mask for models with one kind of attention, else one per kind of layer."""
        columns = torch.arange(step.longest, device=self._device)
        full = (columns <= step.positions[:, None])[:, None, None]
        if self._additive:
            full = torch.zeros_like(full, dtype=self._dtype).masked_fill(
                ~full, torch.finfo(self._dtype).min
            )
        if self._window is None:
            return full
        # A ring that has wrapped is valid everywhere; before that, as far as it is filled.
        ring = full[..., : min(step.longest, self._window)]
        if not self._has_full:
            return ring
        return {"full_attention": full, "sliding_attention": ring, "linear_attention": None}

    def _reserve(self, rows: int, capacity: int) -> None:
        if rows > self._rows or capacity > self._capacity:
            rows = self._rows if rows <= self._rows else max(rows, 2 * self._rows)
            columns = -(-capacity // CAPACITY_STEP) * CAPACITY_STEP
            self._resize(rows, max(columns, self._capacity))

    def _resize(self, rows: int, capacity: int) -> None:
        for slots in self.layers:
            slots.resize(rows, capacity)
        # What all layers have: without memory for the last ones, the next sequence tries it again.
        self._rows, self._capacity = rows, capacity


def _slots(shape: LayerShape, like: torch.Tensor) -> Any:
    if shape.tokens is not None and shape.state is not None:
        return HybridSlots(shape, like)
    if shape.state is not None:
        return LinearSlots(shape.state, like)
    if shape.tokens is None:
        return _Nothing()
    if shape.window is not None:
        return WindowSlots(shape.tokens, shape.window, like)
    return FullSlots(shape.tokens, like)


def _swap_rows(tensor: torch.Tensor, one: int, other: int) -> None:
    kept = tensor[one].clone()
    tensor[one] = tensor[other]
    tensor[other] = kept


def _with_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    grown = tensor.new_zeros((rows, *tensor.shape[1:]))
    kept = min(rows, len(tensor))
    grown[:kept] = tensor[:kept]
    return grown
