"""What one layer of each kind of attention computes: the sizes of its matrices, and its products.

One function per kind. The catalog's models and Hugging Face configs both use them. Norms, biases
and short convolutions are not counted: they are less than one percent of any model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from prfaas.catalog.shape import AttentionWork
from prfaas.kvspec import GQA, MLA, Linear, WindowedGQA

# How a linear layer computes the decay of its state: one number per head (or none), or one per
# channel of the keys, from one matrix or from two of rank k_dim.
Decay: TypeAlias = Literal["head", "low_rank", "channel"]
# How a linear layer computes the gate of its output: from one matrix, or from two of rank v_dim.
OutputGate: TypeAlias = Literal["full", "low_rank"]


@dataclass(frozen=True, slots=True)
class Indexer:
    """Selects the tokens that a layer of sparse attention attends to."""

    heads: int
    dim: int
    selected: int


@dataclass(frozen=True, slots=True)
class LatentHeads:
    """The heads of latent attention, beside the latents that it caches."""

    heads: int
    nope_dim: int  # of a head's key, beside its rope part
    v_dim: int
    q_lora_rank: int = 0  # 0: queries are not compressed
    gated: bool = False  # the output is multiplied with a gate as wide as the values
    indexer: Indexer | None = None


def grouped_work(g: GQA | WindowedGQA, hidden: int, heads: int, gated: bool) -> AttentionWork:
    """`gated`: the output is multiplied with a gate as wide as the queries."""
    query, output = heads * g.k_dim, heads * g.v_dim
    elements = hidden * query * (2 if gated else 1) + output * hidden
    elements += hidden * g.kv_heads * (g.k_dim + g.v_dim)
    window = g.window if isinstance(g, WindowedGQA) else None
    return AttentionWork(
        kind="full" if window is None else "window",
        layers=len(g.layers),
        elements=elements,
        prefill_macs=query + output,
        decode_macs=query + output,
        reach=window,
    )


def latent_work(g: MLA, hidden: int, own: LatentHeads) -> AttentionWork:
    heads, rank, index = own.heads, g.kv_lora_rank, own.indexer
    query, output = heads * (own.nope_dim + g.rope_dim), heads * own.v_dim
    elements = (hidden + query) * own.q_lora_rank if own.q_lora_rank else hidden * query
    elements += hidden * (rank + g.rope_dim)
    elements += rank * heads * (own.nope_dim + own.v_dim)
    elements += output * hidden * (2 if own.gated else 1)
    if index is not None:
        elements += (own.q_lora_rank or hidden) * index.heads * index.dim
        elements += hidden * (index.dim + index.heads)
    # A decoded token, and one that attends to selected tokens, multiplies latents directly.
    absorbed = heads * (2 * rank + g.rope_dim)
    return AttentionWork(
        kind="latent",
        layers=len(g.layers),
        elements=elements,
        prefill_macs=query + output if index is None else absorbed,
        decode_macs=absorbed,
        reach=None if index is None else index.selected,
        index_macs=0 if index is None else index.heads * index.dim,
    )


def linear_work(g: Linear, hidden: int, decay: Decay, output_gate: OutputGate) -> AttentionWork:
    keys, values = g.k_heads * g.k_dim, g.v_heads * g.v_dim
    # Queries, keys, values, one number per head and token, and the output.
    elements = hidden * (2 * keys + values + g.v_heads) + values * hidden
    if decay == "channel":
        elements += hidden * keys
    elif decay == "low_rank":
        elements += g.k_dim * (hidden + keys)
    elements += hidden * values if output_gate == "full" else g.v_dim * (hidden + values)
    # Per token a state is updated once and read once.
    return AttentionWork(
        kind="linear", layers=len(g.layers), elements=elements, state_macs=2 * g.state_elements
    )
