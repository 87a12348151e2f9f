"""What a model computes: its matrices, its attention, its experts. Estimates count work from this.

`Shape` is the catalog's form, beside the groups of a model. `ModelShape` is the common form that a
catalog entry and a Hugging Face config are converted into: only counts, no names to interpret.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import msgspec

from prfaas.catalog.provenance import Status

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]

# Number formats of weights as a checkpoint stores them. int4 and fp4 have a scale per block.
WeightFormat: TypeAlias = Literal["bf16", "fp8", "int4", "fp4"]
# Bytes per element, with the scales: one byte or two per block of 128 (fp8), 32 (int4), 16 to 32
# (fp4: NVFP4 has an fp8 scale per 16 elements, MXFP4 a byte per 32).
BYTES_PER_WEIGHT: dict[WeightFormat, float] = {
    "bf16": 2.0,
    "fp8": 1.0 + 4 / 128**2,
    "int4": 0.5 + 2 / 32,
    "fp4": 0.5 + 1 / 16,
}


class Dense(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Feed-forward layers without experts."""

    layers: Positive
    width: Positive  # of the intermediate activation
    matrices: Positive = 3  # gate, up and down; 2 without a gate


class Experts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Feed-forward layers with experts."""

    layers: Positive
    count: Positive
    per_token: Positive
    width: Positive  # of the intermediate activation of one expert
    shared_width: CountOrZero = 0  # of all experts together that every token passes
    latent: CountOrZero = 0  # experts read and write a projection of this width; 0: no projection
    matrices: Positive = 3  # gate, up and down; 2 without a gate


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes of a model's matrices, beside the attention of its groups."""

    hidden: Positive
    vocabulary: Positive
    status: Status
    source: str
    dense: Dense | None = None
    experts: Experts | None = None
    weights: WeightFormat = "bf16"
    expert_weights: WeightFormat | None = None  # None: like all others
    tied: bool = False  # the output matrix is the embedding
    active_b: float | None = None  # published parameters per token, to check the counts with


@dataclass(frozen=True, slots=True)
class AttentionWork:
    """Layers that mix tokens in the same way, and what one of them computes."""

    kind: Literal["full", "window", "latent", "linear"]
    layers: int
    elements: int  # of its matrices, which every token passes
    prefill_macs: int = 0  # multiply-adds per pair of tokens
    decode_macs: int = 0  # the same for a token that is decoded
    reach: int | None = None  # most tokens that a token attends to; None: all before it
    index_macs: int = 0  # per pair of tokens, to find the tokens within reach
    state_macs: int = 0  # per token, to update and read a state


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as counted work."""

    name: str
    layers: int
    hidden: int
    vocabulary: int
    attention: tuple[AttentionWork, ...]
    dense: Dense | None
    experts: Experts | None
    weights: WeightFormat
    expert_weights: WeightFormat
    tied: bool = False  # the output matrix is the embedding

    @property
    def embedding_elements(self) -> int:
        """Elements of the embedding and of the output matrix."""
        return (1 if self.tied else 2) * self.hidden * self.vocabulary

    @property
    def common_elements(self) -> int:
        """Elements of the matrices that every token passes, without the output matrix."""
        elements = sum(kind.layers * kind.elements for kind in self.attention)
        if self.dense is not None:
            elements += self.dense.layers * self.dense.matrices * self.hidden * self.dense.width
        if self.experts is not None:
            shared = self.experts.matrices * self.hidden * self.experts.shared_width
            router = self.hidden * self.experts.count
            projections = 2 * self.hidden * self.experts.latent
            elements += self.experts.layers * (shared + router + projections)
        return elements

    @property
    def expert_elements(self) -> int:
        """Elements of one expert of one layer."""
        if self.experts is None:
            return 0
        return self.experts.matrices * (self.experts.latent or self.hidden) * self.experts.width

    @property
    def routed_elements(self) -> int:
        """Elements of the routed experts that one token passes, in all layers."""
        if self.experts is None:
            return 0
        return self.experts.layers * self.experts.per_token * self.expert_elements

    @property
    def active_elements(self) -> int:
        """Elements that one token is multiplied with, without the embedding and output matrix."""
        return self.common_elements + self.routed_elements

    @property
    def total_elements(self) -> int:
        """All parameters, with an embedding and an output matrix."""
        routed = 0
        if self.experts is not None:
            routed = self.experts.layers * self.experts.count * self.expert_elements
        return self.common_elements + routed + self.embedding_elements

    @property
    def weight_bytes(self) -> float:
        """Bytes of all weights. Embedding and output matrix are kept in bf16."""
        routed = self.total_elements - self.common_elements - self.embedding_elements
        return (
            self.common_elements * BYTES_PER_WEIGHT[self.weights]
            + routed * BYTES_PER_WEIGHT[self.expert_weights]
            + self.embedding_elements * BYTES_PER_WEIGHT["bf16"]
        )

    def experts_read(self, tokens: float) -> float:
        """Expected number of different experts of a layer that `tokens` tokens pass, if each token
        chooses its experts evenly and independently."""
        if self.experts is None:
            return 0.0
        missed: float = (1 - self.experts.per_token / self.experts.count) ** tokens
        return self.experts.count * (1 - missed)
