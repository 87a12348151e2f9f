"""Models in the catalog: geometry with a source, from which a KVSpec is made."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from prfaas.catalog.attention_work import (
    Decay,
    Indexer,
    LatentHeads,
    OutputGate,
    grouped_work,
    latent_work,
    linear_work,
)
from prfaas.catalog.provenance import Sourced, Status
from prfaas.catalog.shape import AttentionWork, ModelShape, Shape
from prfaas.errors import InputError
from prfaas.kvspec import GQA, MLA, KVSpec, Linear, WindowedGQA, build_spec

Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
LayerNumber: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
# "all": every layer of the model. "rest": every layer that no other group names.
LayerSet: TypeAlias = list[LayerNumber] | Literal["all", "rest"]


class GQAGroup(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="gqa"
):
    layers: LayerSet
    kv_heads: Positive
    k_dim: Positive
    v_dim: Positive
    mechanism: str = "GQA"
    heads: Positive | None = None  # query heads
    gated: bool = False  # the output is multiplied with a gate as wide as the queries

    def geometry(self, at: tuple[int, ...]) -> GQA:
        return GQA(at, self.kv_heads, self.k_dim, self.v_dim)

    def work(self, hidden: int, at: tuple[int, ...]) -> AttentionWork | None:
        if self.heads is None:
            return None
        return grouped_work(self.geometry(at), hidden, self.heads, self.gated)


class WindowGroup(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="window"
):
    layers: LayerSet
    kv_heads: Positive
    k_dim: Positive
    v_dim: Positive
    window: Positive
    mechanism: str = "SWA"
    heads: Positive | None = None  # query heads
    gated: bool = False  # the output is multiplied with a gate as wide as the queries

    def geometry(self, at: tuple[int, ...]) -> WindowedGQA:
        return WindowedGQA(at, self.kv_heads, self.k_dim, self.v_dim, self.window)

    def work(self, hidden: int, at: tuple[int, ...]) -> AttentionWork | None:
        if self.heads is None:
            return None
        return grouped_work(self.geometry(at), hidden, self.heads, self.gated)


class MLAGroup(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mla"
):
    layers: LayerSet
    kv_lora_rank: Positive
    rope_dim: Positive
    indexer_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    mechanism: str = "MLA"
    heads: Positive | None = None
    nope_dim: Positive = 128  # of a head's key, beside its rope part
    v_dim: Positive = 128
    q_lora_rank: Annotated[int, msgspec.Meta(ge=0)] = 0  # 0: queries are not compressed
    gated: bool = False  # the output is multiplied with a gate as wide as the values
    indexer_heads: Annotated[int, msgspec.Meta(ge=0)] = 0
    indexer_dim: Positive = 128
    selected: Positive | None = None  # tokens that the indexer selects

    def geometry(self, at: tuple[int, ...]) -> MLA:
        return MLA(at, self.kv_lora_rank, self.rope_dim, self.indexer_bytes)

    def work(self, hidden: int, at: tuple[int, ...]) -> AttentionWork | None:
        if self.heads is None:
            return None
        indexer = None
        if self.indexer_heads and self.selected is not None:
            indexer = Indexer(self.indexer_heads, self.indexer_dim, self.selected)
        heads = LatentHeads(
            self.heads, self.nope_dim, self.v_dim, self.q_lora_rank, self.gated, indexer
        )
        return latent_work(self.geometry(at), hidden, heads)


class LinearGroup(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="linear"
):
    layers: LayerSet
    k_heads: Positive
    v_heads: Positive
    k_dim: Positive
    v_dim: Positive
    conv_kernel: Positive
    mechanism: str = "linear"
    decay: Decay = "head"
    output_gate: OutputGate = "full"

    def geometry(self, at: tuple[int, ...]) -> Linear:
        return Linear(at, self.k_heads, self.v_heads, self.k_dim, self.v_dim, self.conv_kernel)

    def work(self, hidden: int, at: tuple[int, ...]) -> AttentionWork:
        return linear_work(self.geometry(at), hidden, self.decay, self.output_gate)


ModelGroup: TypeAlias = GQAGroup | WindowGroup | MLAGroup | LinearGroup


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    layers: Positive
    groups: Annotated[list[ModelGroup], msgspec.Meta(min_length=1)]
    status: Status
    source: str
    title: str = ""
    hugging_face: str | None = None
    parameters_b: Sourced | None = None
    kv_dtype: str = "bfloat16"
    state_dtype: str = "float32"
    shape: Shape | None = None  # None: times of this model cannot be estimated

    @property
    def display_name(self) -> str:
        return self.title or self.name

    def spec(self, kv_dtype: str | None = None) -> KVSpec:
        geometries = [g.geometry(at) for g, at in zip(self.groups, self._placed(), strict=True)]
        return build_spec(
            geometries, kv_dtype=kv_dtype or self.kv_dtype, state_dtype=self.state_dtype
        )

    def model_shape(self) -> ModelShape:
        """The model as counted work. Raises where the entry does not say enough."""
        shape = self.shape
        if shape is None:
            raise InputError(
                f"the catalog does not have the matrices of {self.name}, so its times cannot be "
                "estimated",
                fix="add [models.shape] to its entry, name its config.json, or measure a profile",
            )
        attention = []
        for index, (group, at) in enumerate(zip(self.groups, self._placed(), strict=True)):
            work = group.work(shape.hidden, at)
            if work is None:
                raise InputError(
                    f"the number of query heads of {self.name} is not known",
                    where=f"models.{self.name}.groups.{index}.heads",
                    fix="add heads = ... to this group",
                )
            attention.append(work)
        return ModelShape(
            name=self.name,
            layers=self.layers,
            hidden=shape.hidden,
            vocabulary=shape.vocabulary,
            attention=tuple(attention),
            dense=shape.dense,
            experts=shape.experts,
            weights=shape.weights,
            expert_weights=shape.expert_weights or shape.weights,
            tied=shape.tied,
        )

    def _placed(self) -> list[tuple[int, ...]]:
        """Each group's layer numbers. A layer may be in two groups (Falcon-H1: attention and a
        state in one layer), and in none (a layer without a mixer)."""
        named: set[int] = set()
        for index, group in enumerate(self.groups):
            if isinstance(group.layers, list):
                where = f"models.{self.name}.groups.{index}.layers"
                beyond = [layer for layer in group.layers if layer >= self.layers]
                if beyond or not group.layers or len(set(group.layers)) < len(group.layers):
                    raise InputError(
                        f"{beyond or group.layers} is not a list of this model's layers",
                        where=where,
                        fix=f"list each layer once, from 0 to {self.layers - 1}",
                    )
                named.update(group.layers)
        rest = tuple(layer for layer in range(self.layers) if layer not in named)
        placed: list[tuple[int, ...]] = []
        for index, group in enumerate(self.groups):
            if isinstance(group.layers, list):
                at = tuple(group.layers)
            else:
                at = rest if group.layers == "rest" else tuple(range(self.layers))
            if not at:
                raise InputError(
                    "no layer is left for this group",
                    where=f"models.{self.name}.groups.{index}.layers",
                    fix="name its layers, or remove the group",
                )
            placed.append(at)
        return placed
