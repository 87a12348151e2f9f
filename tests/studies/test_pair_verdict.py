from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvspec import FullAttention, KVSpec, LinearState, SlidingWindow
from prfaas.studies.pair_verdict import EngineSide, PairLink, PairVerdict, judge, whole_block_bytes
from prfaas.types import Compat

SPEC = KVSpec(
    (
        FullAttention("full0", (0, 1), 64),
        SlidingWindow("window0", (2,), 64, window=100),
        LinearState("linear0", (3,), 1_000),
    )
)
FORMAT = Compat("Falcon", "abc", "float32", "float32", 64, "canonical")
NATIVE = msgspec.structs.replace(FORMAT, block_tokens=128, layout="vllm 0.32 cpu blocks 1234")
LINK = PairLink(gbps=8.0, rtt_s=0.02)  # 10^9 bytes per second
TOKENS = 1_000


def side(name: str, compat: Compat = FORMAT, spec: KVSpec = SPEC, **more: Any) -> EngineSide:
    return EngineSide(name, compat, spec, **more)


def verdict(a: Compat, b: Compat) -> PairVerdict:
    return judge(side("A", a), side("B", b), tokens=TOKENS, link=LINK)


def changed(compat: Compat, **fields: object) -> Compat:
    return msgspec.structs.replace(compat, **fields)


# What hands over ----------------------------------------------------------------------------------


def test_unlike_engines_in_the_canonical_form_send_exactly_kv_bytes() -> None:
    found = verdict(FORMAT, FORMAT)
    assert found.form == found.possible_form == "canonical"
    assert not found.differences and not found.fixes and not found.warnings
    canonical, native = found.costs
    assert canonical.nbytes == SPEC.kv_bytes(TOKENS) and canonical.exact
    assert canonical.link_s == pytest.approx(SPEC.kv_bytes(TOKENS) / 1e9 + 0.02)
    assert canonical.convert_s is None
    # Neither engine says how large its own blocks are.
    assert native.nbytes == whole_block_bytes(SPEC, TOKENS, 64) and not native.exact


def test_twins_in_the_native_form_send_whole_blocks() -> None:
    found = verdict(NATIVE, NATIVE)
    assert found.form == found.possible_form == "native"
    canonical, native = found.costs
    # 8 blocks of full attention, 1 of the window (tokens 901 to 999 are in block 7), a state.
    assert native.nbytes == 8 * 128 * 64 * 2 + 1 * 128 * 64 + 1_000
    assert native.exact and native.block_tokens == 128
    assert canonical.nbytes == SPEC.kv_bytes(TOKENS) and not canonical.exact


def test_an_emulated_engine_sends_no_unused_rows() -> None:
    emulated = changed(FORMAT, layout="emulated")
    found = verdict(emulated, emulated)
    assert found.form == "native"
    assert found.costs[1].nbytes == SPEC.kv_bytes(TOKENS) and found.costs[1].exact


def test_the_block_size_to_compare_with_and_the_time_to_convert() -> None:
    a, b = side("A"), side("B")
    link = PairLink(gbps=8.0, convert_bytes_per_s=2e9)
    found = judge(a, b, tokens=TOKENS, link=link, native_block_tokens=256)
    canonical, native = found.costs
    assert native.nbytes == whole_block_bytes(SPEC, TOKENS, 256) and native.block_tokens == 256
    assert native.convert_s is None
    assert canonical.convert_s == pytest.approx(SPEC.kv_bytes(TOKENS) / 2e9)
    # A native engine's own size counts more than a given one.
    own = judge(side("A", NATIVE), b, tokens=TOKENS, link=link, native_block_tokens=256)
    assert own.costs[1].block_tokens == 128 and own.costs[1].exact


def both(name: str, native: Compat = NATIVE, canonical: Compat = FORMAT) -> EngineSide:
    return side(name, canonical, other=side(name, native))


def test_engines_with_both_forms_use_the_native_one_where_they_are_equal() -> None:
    found = judge(both("A"), both("B"), tokens=TOKENS, link=LINK)
    assert (found.form, found.differences) == ("native", ())
    assert all(cost.exact for cost in found.costs)
    found = judge(both("A"), side("B", NATIVE), tokens=TOKENS, link=LINK)
    assert found.form == "native"


def test_engines_with_both_forms_use_the_canonical_one_where_they_are_not() -> None:
    other = changed(NATIVE, tensor_parallel=4, layout="vllm 0.32 cpu blocks 99")
    found = judge(both("A"), both("B", other), tokens=TOKENS, link=LINK)
    assert (found.form, found.differences) == ("canonical", ())
    assert judge(side("A"), both("B"), tokens=TOKENS, link=LINK).form == "canonical"


def test_unlike_engines_are_compared_in_the_form_in_which_they_differ_least() -> None:
    other = changed(NATIVE, tensor_parallel=4, kv_dtype="bfloat16")
    cast = changed(FORMAT, kv_dtype="bfloat16")
    found = judge(both("A"), both("B", other, cast), tokens=TOKENS, link=LINK)
    assert found.form is None and found.possible_form == "canonical"
    assert [one.field for one in found.differences] == ["kv_dtype"]


# What does not ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("model", "Gemma", "serve the same model on both"),
        ("revision", "def", "start both engines from the same checkpoint files"),
    ],
)
def test_another_meaning_is_final(field: str, value: str, fix: str) -> None:
    """Also between unlike layouts: a change of form would not help, so it is not advised."""
    for other in (FORMAT, NATIVE):
        found = verdict(FORMAT, changed(other, **{field: value}))
        assert found.form is None and found.possible_form is None
        assert found.fixes == (fix,)
        (one,) = [one for one in found.differences if one.field == field]
        assert (one.a, one.b, one.final) == (getattr(FORMAT, field), value, True)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"kv_dtype": "bfloat16"}, '"wire_kv_dtype" in kv_connector_extra_config'),
        ({"state_dtype": "bfloat16"}, '"wire_state_dtype" in kv_connector_extra_config'),
        ({"block_tokens": 128}, '"block_tokens" in kv_connector_extra_config'),
        ({"tensor_parallel": 2}, "the same version of prfaas"),
    ],
)
def test_a_setting_of_the_canonical_form(fields: dict[str, object], says: str) -> None:
    found = verdict(FORMAT, changed(FORMAT, **fields))
    assert found.form is None and found.possible_form == "canonical"
    assert [one.field for one in found.differences] == [*fields]
    (fix,) = found.fixes
    assert says in fix


def test_a_native_server_and_a_node_need_the_canonical_form_at_the_server_only() -> None:
    found = verdict(FORMAT, NATIVE)
    assert found.form is None and found.possible_form == "canonical"
    assert {one.field for one in found.differences} == {"block_tokens", "layout"}
    assert found.fixes == ('set "form": "auto" in kv_connector_extra_config of B',)
    assert [cost.exact for cost in found.costs] == [True, True]


def test_two_unlike_servers_need_the_canonical_form_at_both() -> None:
    other = changed(NATIVE, tensor_parallel=2, block_tokens=64, layout="vllm 0.32 cpu blocks 99")
    found = verdict(NATIVE, other)
    assert found.possible_form == "canonical"
    assert {one.field for one in found.differences} == {
        "block_tokens",
        "layout",
        "tensor_parallel",
    }
    assert found.fixes == ('set "form": "auto" in kv_connector_extra_config of A and B',)


def test_an_emulated_engine_cannot_convert() -> None:
    found = verdict(FORMAT, changed(FORMAT, layout="emulated"))
    assert found.possible_form is None
    assert found.fixes == ("use an engine that has the canonical form instead of B",)


@pytest.mark.parametrize(
    ("dtypes", "differs"),
    [
        ("float32", False),
        ("none", False),  # the spec's linear group is what counts, not the name
        ("bfloat16+float32", True),
        ("bfloat16", True),
    ],
)
def test_the_dtypes_of_a_native_servers_states(dtypes: str, differs: bool) -> None:
    """The native format lists the dtypes of states and convolution histories."""
    found = verdict(FORMAT, changed(NATIVE, state_dtype=dtypes))
    assert ("state_dtype" in [one.field for one in found.differences]) == differs


def test_a_model_without_states_has_no_dtype_of_states() -> None:
    spec = KVSpec((FullAttention("full0", (0,), 64),))
    native = side("B", changed(NATIVE, state_dtype="none"), spec)
    found = judge(side("A", spec=spec), native, tokens=TOKENS, link=LINK)
    assert "state_dtype" not in [one.field for one in found.differences]


def test_equal_formats_with_other_groups_are_not_a_pair() -> None:
    """Two versions that read a config differently: the transfer would fail after the prefill."""
    other = KVSpec((FullAttention("full0", (0, 1), 65), *SPEC.groups[1:2]))
    found = judge(side("A"), side("B", spec=other), tokens=TOKENS, link=LINK)
    assert found.form is None
    assert [one.field for one in found.differences] == ["group full0", "group linear0"]
    assert found.differences[0].a == "layers 0, 1: 64 bytes per token"
    assert found.differences[1].b == "missing"
    assert found.fixes == ("use the same version of prfaas on both",)


def test_a_hand_off_larger_than_a_kvds_memory_is_told() -> None:
    nbytes = SPEC.kv_bytes(TOKENS)
    small = side("B", capacity_bytes=nbytes - 1)
    found = judge(side("A", capacity_bytes=nbytes), small, tokens=TOKENS, link=LINK)
    (warning,) = found.warnings
    assert "the kvd of B" in warning and "--memory" in warning


# Properties ---------------------------------------------------------------------------------------

formats = st.builds(
    Compat,
    model=st.sampled_from(["m", "n"]),
    revision=st.sampled_from(["1", "2"]),
    kv_dtype=st.sampled_from(["float32", "bfloat16"]),
    state_dtype=st.sampled_from(["float32", "bfloat16+float32", "none"]),
    block_tokens=st.sampled_from([64, 128]),
    layout=st.sampled_from(["canonical", "vllm 0.32 cpu blocks 1", "vllm 0.33", "emulated"]),
    tensor_parallel=st.sampled_from([1, 2]),
)


@given(formats, formats)
def test_a_verdict_is_the_kvds_own_and_the_same_from_both_ends(a: Compat, b: Compat) -> None:
    there, back = verdict(a, b), verdict(b, a)
    assert (there.form is not None) == (not a.differences(b))
    assert (there.form, there.possible_form) == (back.form, back.possible_form)
    assert [one.field for one in there.differences] == [one.field for one in back.differences]
    assert bool(there.fixes) == bool(there.differences) == (there.form is None)


specs = st.builds(
    lambda full, window, size: KVSpec(
        (
            FullAttention("full0", tuple(range(full)), 3),
            SlidingWindow("window0", tuple(range(50, 50 + window)), 5, window=size),
            LinearState("linear0", (90,), 11),
        )
    ),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(2, 40),
)


@given(specs, st.integers(1, 300), st.integers(1, 64), st.integers(0, 5))
def test_whole_blocks_are_those_with_a_needed_token(
    spec: KVSpec, tokens: int, block: int, skipped: int
) -> None:
    skip = min(skipped * block, tokens // block * block)
    full, window, linear = spec.groups
    assert isinstance(window, SlidingWindow) and isinstance(full, FullAttention)
    needed = {
        full: range(skip, tokens),
        window: range(window.first_token(tokens), tokens),
    }
    blocks = {group: {token // block for token in span} for group, span in needed.items()}
    expected = sum(
        len(group.layers) * len(found) * block * group.bytes_per_token
        for group, found in blocks.items()
    )
    found = whole_block_bytes(spec, tokens, block, skip)
    assert found == expected + len(linear.layers) * 11
    assert found >= spec.kv_bytes(tokens, skip)
