"""Models in the catalog: geometry with a source, from which a KVSpec is made."""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

from prfaas.catalog.provenance import Sourced, Status
from prfaas.catalog.shape import AttentionWork, ModelShape, Shape
from prfaas.errors import InputError
from prfaas.kvspec import GQA, MLA, Geometry, KVSpec, Linear, WindowedGQA, build_spec

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

    def geometry(self, at: tuple[int, ...]) -> Geometry:
        return GQA(at, self.kv_heads, self.k_dim, self.v_dim)

    def work(self, hidden: int, layers: int) -> AttentionWork | None:
        if self.heads is None:
            return None
        return plain_work(self, self.heads, hidden, layers, reach=None)


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

    def geometry(self, at: tuple[int, ...]) -> Geometry:
        return WindowedGQA(at, self.kv_heads, self.k_dim, self.v_dim, self.window)

    def work(self, hidden: int, layers: int) -> AttentionWork | None:
        if self.heads is None:
            return None
        return plain_work(self, self.heads, hidden, layers, reach=self.window)


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
    indexer_heads: Annotated[int, msgspec.Meta(ge=0)] = 0
    indexer_dim: Positive = 128
    selected: Positive | None = None  # tokens that the indexer selects

    def geometry(self, at: tuple[int, ...]) -> Geometry:
        return MLA(at, self.kv_lora_rank, self.rope_dim, self.indexer_bytes)

    def work(self, hidden: int, layers: int) -> AttentionWork | None:
        if self.heads is None:
            return None
        heads, rank = self.heads, self.kv_lora_rank
        query = heads * (self.nope_dim + self.rope_dim)
        elements = (hidden + query) * self.q_lora_rank if self.q_lora_rank else hidden * query
        elements += hidden * (rank + self.rope_dim)
        elements += rank * heads * (self.nope_dim + self.v_dim) + heads * self.v_dim * hidden
        index = self.indexer_heads * self.indexer_dim
        if index:
            elements += (self.q_lora_rank or hidden) * index
            elements += hidden * (self.indexer_dim + self.indexer_heads)
        # A decoded token, and one that attends to selected tokens, multiplies latents directly.
        absorbed = heads * (2 * rank + self.rope_dim)
        return AttentionWork(
            kind="latent",
            layers=layers,
            elements=elements,
            prefill_macs=absorbed if index else query + heads * self.v_dim,
            decode_macs=absorbed,
            reach=self.selected,
            index_macs=index,
        )


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
    gates: Literal["full", "low_rank"] = "full"  # low_rank: two gates of rank k_dim (KDA)

    def geometry(self, at: tuple[int, ...]) -> Geometry:
        return Linear(at, self.k_heads, self.v_heads, self.k_dim, self.v_dim, self.conv_kernel)

    def work(self, hidden: int, layers: int) -> AttentionWork:
        keys, values = self.k_heads * self.k_dim, self.v_heads * self.v_dim
        elements = hidden * (2 * keys + values + self.v_heads) + values * hidden
        if self.gates == "full":
            elements += hidden * values
        else:
            elements += self.k_dim * (hidden + keys) + self.v_dim * (hidden + values)
        # Per token a state is updated once and read once.
        state = 2 * self.v_heads * self.k_dim * self.v_dim
        return AttentionWork(kind="linear", layers=layers, elements=elements, state_macs=state)


def plain_work(
    group: GQAGroup | WindowGroup, heads: int, hidden: int, layers: int, reach: int | None
) -> AttentionWork:
    query, output = heads * group.k_dim, heads * group.v_dim
    elements = hidden * query * (2 if group.gated else 1) + output * hidden
    elements += hidden * group.kv_heads * (group.k_dim + group.v_dim)
    kind: Literal["full", "window"] = "full" if reach is None else "window"
    pair = query + output
    return AttentionWork(kind, layers, elements, prefill_macs=pair, decode_macs=pair, reach=reach)


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
            work = group.work(shape.hidden, len(at))
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
