"""States of linear layers, between engines with other numbers of ranks and other layouts."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.device import StagingRing
from prfaas.errors import EngineError, InputError
from prfaas.integrations.canonical import (
    ConvShare,
    Heads,
    StateConverter,
    StateForm,
    delta_rule_share,
    mamba2_share,
)
from prfaas.kvspec import Linear
from prfaas.kvspec.parts import Part
from tests.integrations.canonical.caches import DTYPES, HostPins, Pages, raw

RINGS = ["none", "staged", "pinned pages"]


@dataclass(frozen=True)
class Kind:
    name: str
    linear: Linear
    delta_rule: bool

    def share(self, rank: int, ranks: int) -> ConvShare:
        share = delta_rule_share if self.delta_rule else mamba2_share
        return share(self.linear, rank, ranks)

    @property
    def channels(self) -> int:
        return 2 * self.linear.k_heads * self.linear.k_dim + self.linear.v_heads * self.linear.v_dim

    @property
    def dims(self) -> tuple[int, int]:
        """Of a head, in transformers' order."""
        k, v = self.linear.k_dim, self.linear.v_dim
        return (k, v) if self.delta_rule else (v, k)


KINDS = [
    Kind("Mamba-2, one group", Linear((0,), 1, 8, 5, 3, 4), False),
    Kind("Mamba-2, four groups", Linear((0,), 4, 8, 5, 3, 4), False),
    Kind("gated delta net", Linear((0,), 4, 8, 6, 5, 4), True),
    Kind("KDA", Linear((0,), 4, 4, 4, 4, 2), True),
]
# Layouts of a head's state: as on the wire, transposed (GPU), with a shape that lies (CPU).
VIEWS = ["plain", "transposed", "relabelled"]


@dataclass
class Engine:
    converters: list[StateConverter]
    blocks: list[tuple[torch.Tensor, torch.Tensor]]
    shares: list[ConvShare]
    heads: Heads
    view: str
    channels_first: bool

    def put(self, block: int, state: torch.Tensor, conv: torch.Tensor) -> None:
        """The whole state into the ranks' blocks, element by element."""
        for rank, (native_conv, ssm) in enumerate(self.blocks):
            held = self.heads.of(rank)
            own = state[held.start : held.stop]
            if self.view == "transposed":
                own = own.transpose(1, 2)
            ssm[block] = own.reshape(ssm.shape[1:])  # relabelled: the same bytes, other dims
            rows = conv[list(itertools.chain(*self.shares[rank].held))]
            native_conv[block] = rows if self.channels_first else rows.T


def engine(
    kind: Kind, ranks: int, view: str, first: bool, ring: str, dtypes: tuple[str, str, str, str]
) -> Engine:
    """`dtypes`: of the state and the history in the engine, then on the wire."""
    linear = kind.linear
    heads = Heads(linear.v_heads, ranks)
    columns = linear.conv_kernel - 1
    parts = (
        Part("state", (linear.v_heads, linear.k_dim * linear.v_dim), dtypes[2]),
        Part("conv", (kind.channels, columns), dtypes[3]),
    )
    staging = None
    if ring != "none":
        staging = StagingRing(
            "cpu", ring_bytes=1 << 16, pins=HostPins() if ring == "pinned pages" else None
        )
    found = Engine([], [], [], heads, view, first)
    for rank in range(ranks):
        share = kind.share(rank, ranks)
        local = sum(len(run) for run in share.held)
        dims = kind.dims if view == "plain" else kind.dims[::-1]
        ssm = torch.full((5, len(heads.of(rank)), *dims), float("nan")).to(DTYPES[dtypes[0]])
        sizes = (local, columns) if first else (columns, local)
        conv = torch.full((5, *sizes), float("nan")).to(DTYPES[dtypes[1]])
        form = StateForm(
            parts,
            heads.of(rank),
            share,
            conv_channels_first=first,
            transposed=view == "transposed",
            relabelled=view == "relabelled",
        )
        found.converters.append(StateConverter(conv, ssm, form, staging))
        found.blocks.append((conv, ssm))
        found.shares.append(share)
    return found


WIDE = st.sampled_from(["float32", "bfloat16"])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), wire=st.tuples(WIDE, WIDE))
def test_any_engine_to_any_engine(data: st.DataObject, kind: Kind, wire: tuple[str, str]) -> None:
    hand_over(data, kind, wire)


@pytest.mark.grid
@settings(max_examples=600, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS), wire=st.tuples(WIDE, WIDE))
def test_any_engine_to_any_engine_at_length(
    data: st.DataObject, kind: Kind, wire: tuple[str, str]
) -> None:
    hand_over(data, kind, wire)


def hand_over(data: st.DataObject, kind: Kind, wire: tuple[str, str]) -> None:
    generator = torch.Generator().manual_seed(3)
    linear = kind.linear
    state = torch.randn(linear.v_heads, *kind.dims, generator=generator).bfloat16().float()
    conv = torch.randn(kind.channels, linear.conv_kernel - 1, generator=generator)
    conv = conv.bfloat16().float()
    expected = raw(state.to(DTYPES[wire[0]])) + raw(conv.to(DTYPES[wire[1]]))

    def drawn() -> Engine:
        return engine(
            kind,
            data.draw(st.sampled_from([1, 2, 4])),
            data.draw(st.sampled_from(VIEWS if kind.delta_rule else ["plain"])),
            data.draw(st.booleans()),
            data.draw(st.sampled_from(RINGS)),
            (data.draw(WIDE), data.draw(WIDE), *wire),
        )

    def drawn_pages() -> Pages:
        cuts = data.draw(st.lists(st.integers(0, len(expected)), max_size=5))
        return Pages(len(expected), cuts, data.draw(st.sampled_from([0, 0, 1, 2])))

    source, target = drawn(), drawn()
    source.put(3, state, conv)
    pages = drawn_pages()
    copied = sum(converter.save(3, pages.views) for converter in source.converters)
    assert pages.content == expected
    assert copied == len(expected)
    assert pages.guards_are_whole()

    pages = drawn_pages()
    pages.content = expected
    for converter in target.converters:
        converter.load(2, pages.views)
    found = [(conv.clone(), ssm.clone()) for conv, ssm in target.blocks]
    for native_conv, ssm in target.blocks:
        native_conv.fill_(float("nan"))
        ssm.fill_(float("nan"))
    target.put(2, state, conv)
    for loaded, judge in zip(found, target.blocks, strict=True):
        for a, b in zip(loaded, judge, strict=True):
            assert torch.equal(a.nan_to_num(777.0), b.nan_to_num(777.0))
    assert pages.content == expected


@pytest.mark.parametrize("ring", RINGS)
def test_a_state_without_a_history(ring: str) -> None:
    ssm = torch.randn(4, 3, 2, 5)
    form = StateForm((Part("state", (6, 10), "float32"),), range(2, 5))
    staging = None if ring == "none" else StagingRing("cpu", ring_bytes=1 << 14)
    converter = StateConverter(None, ssm, form, staging)
    pages = Pages(240, [77])
    pages.fill(9)
    assert converter.save(1, pages.views) == 120
    assert pages.content == bytes([9]) * 80 + raw(ssm[1]) + bytes([9]) * 40
    assert converter.load(2, pages.views) == 120
    assert torch.equal(ssm[1], ssm[2])


def test_only_rank_0_writes_what_every_rank_holds() -> None:
    kind = KINDS[0]
    engines = engine(kind, 2, "plain", False, "none", ("float32",) * 4)
    engines.put(1, torch.ones(8, *kind.dims), torch.ones(kind.channels, 3))
    size = engines.converters[0].state_bytes
    pages = Pages(size, [])
    pages.fill(0)
    engines.converters[1].save(1, pages.views)
    shared = size - 2 * 5 * 3 * 4  # B and C, the last channels
    assert not any(pages.content[shared:])
    engines.converters[0].save(1, pages.views)
    assert any(pages.content[shared:])


GOOD = StateForm(
    (Part("state", (4, 6), "float32"), Part("conv", (8, 3), "float32")),
    range(2),
    ConvShare((range(2), range(4, 6)), (True, True)),
)


@pytest.mark.parametrize(
    ("form", "problem"),
    [
        (replace(GOOD, heads=range(3)), "3 heads of 6 elements"),
        (replace(GOOD, heads=range(3, 5)), "not a range of 4 heads"),
        (replace(GOOD, heads=range(0, 4, 2)), "not a range of 4 heads"),
        (replace(GOOD, parts=(Part("state", (4, 7), "float32"), GOOD.parts[1])), "of 7 elements"),
        (replace(GOOD, parts=(GOOD.parts[0], Part("conv", (8, 2), "float32"))), "speculative"),
        (replace(GOOD, parts=GOOD.parts[:1]), "no place"),
        (replace(GOOD, parts=GOOD.parts[::-1]), "not those of a linear layer"),
        (replace(GOOD, parts=()), "not those of a linear layer"),
        (replace(GOOD, channels=None), "the layer has none"),
        (replace(GOOD, channels=ConvShare((range(3), range(4, 6)), (True, True))), "5 channels"),
        (replace(GOOD, channels=ConvShare((range(2), range(7, 9)), (True, True))), "not ranges"),
        (replace(GOOD, conv_channels_first=True), "does not have 4 channels"),
        (replace(GOOD, transposed=True, relabelled=True), "transposed and relabelled"),
        (
            replace(GOOD, parts=(Part("state", (4, 6), "float8_e5m2"), GOOD.parts[1])),
            "wire_state_dtype",
        ),
    ],
)
def test_forms_that_do_not_suit_the_tensors_are_refused(form: StateForm, problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        StateConverter(torch.zeros(5, 3, 4), torch.zeros(5, 2, 2, 3), form)


def test_a_state_on_a_device_needs_staging() -> None:
    with pytest.raises(InputError, match="StagingRing"):
        StateConverter(None, torch.zeros(5, 2, 2, 3, device="meta"), GOOD)


@pytest.mark.parametrize("ring", RINGS)
def test_blocks_and_pages_that_do_not_fit_are_refused(ring: str) -> None:
    staging = None if ring == "none" else StagingRing("cpu", ring_bytes=1 << 14)
    conv, ssm = torch.ones(5, 3, 4), torch.ones(5, 2, 2, 3)
    converter = StateConverter(conv, ssm, GOOD, staging)
    assert converter.state_bytes == 4 * 6 * 4 + 8 * 3 * 4
    for block in (-1, 5):
        with pytest.raises(EngineError, match="not among the 5 blocks"):
            converter.save(block, Pages(192, []).views)
        with pytest.raises(EngineError, match="not among the 5 blocks"):
            converter.load(block, Pages(192, []).views)
    for nbytes in (191, 193):
        with pytest.raises(EngineError, match=f"{nbytes} bytes"):
            converter.save(1, Pages(nbytes, []).views)
        with pytest.raises(EngineError, match=f"{nbytes} bytes"):
            converter.load(1, Pages(nbytes, []).views)
    assert (conv == 1).all() and (ssm == 1).all()
