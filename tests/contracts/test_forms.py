"""Which form a pair of engines uses: native between equals, else canonical, else none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.contracts.forms import choose_compat
from prfaas.types import CANONICAL, Compat

NATIVE = Compat("m", "1", "float32", "float32", 16, "vllm 0.32 cpu blocks abc")
OTHER = Compat("m", "1", "float32", "float32", 128, "vllm 0.32 cpu blocks def", 2)
WIRE = Compat("m", "1", "float32", "float32", 64, CANONICAL)
CAST = Compat("m", "1", "bfloat16", "float32", 64, CANONICAL)
# A kvd has at most one pool of each form.
FORMATS = st.tuples(
    st.sampled_from([WIRE, CAST, None]), st.sampled_from([NATIVE, OTHER, None])
).map(lambda pools: [compat for compat in pools if compat is not None])


def test_equal_engines_use_the_native_form() -> None:
    assert choose_compat((WIRE, NATIVE), (WIRE, NATIVE)) == NATIVE
    assert choose_compat((WIRE, NATIVE), (NATIVE,)) == NATIVE


def test_unlike_engines_use_the_canonical_form() -> None:
    assert choose_compat((WIRE, NATIVE), (WIRE, OTHER)) == WIRE
    assert choose_compat((WIRE,), (WIRE, OTHER)) == WIRE


def test_engines_whose_bytes_differ_in_meaning_have_no_form() -> None:
    assert choose_compat((CAST, NATIVE), (WIRE, OTHER)) is None
    assert choose_compat((), (WIRE,)) is None


@given(FORMATS, FORMATS)
def test_both_ends_choose_the_same_form(sender: list[Compat], receiver: list[Compat]) -> None:
    found = choose_compat(sender, receiver)
    assert found == choose_compat(receiver, sender)
    assert (found is None) == (not set(sender) & set(receiver))
    assert found is None or (found in sender and found in receiver)
