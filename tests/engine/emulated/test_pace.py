from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.engine.emulated.pace import Pace, Scales, scaled_spec
from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from tests.engine.emulated.builders import PROFILE, SPEC, STEPS


@given(
    cached=st.integers(0, 2000),
    cuts=st.lists(st.integers(1, 3000), min_size=1, max_size=6, unique=True),
)
def test_chunks_add_up_to_the_whole(cached: int, cuts: list[int]) -> None:
    pace = Pace(PROFILE, STEPS, Scales(time=0.1))
    ends = [cached, *(cached + cut for cut in sorted(cuts))]
    chunks = [pace.prefill_s(cached, a, b) for a, b in zip(ends, ends[1:], strict=False)]
    assert all(chunk >= 0 for chunk in chunks)
    whole = float(PROFILE.seconds(max(cuts), cached))
    assert sum(chunks) == pytest.approx(0.1 * whole)


def test_steps_are_linear_between_batches_and_stretch_with_fewer_tokens() -> None:
    pace = Pace(PROFILE, STEPS, Scales(time=0.5, output=0.25))
    for batch, step_s in ((1, 0.2), (8, 0.5), (4, 0.2 + 0.3 * 3 / 7)):
        assert pace.step_s(batch) == pytest.approx(step_s * 0.5 / 0.25)
    assert pace.largest_batch == 8


def test_bytes_shrink_in_proportion_and_never_to_nothing() -> None:
    spec = KVSpec((FullAttention("full0", (0, 1), 1000), LinearState("linear0", (2,), 50_000)))
    assert scaled_spec(spec, 0.01).kv_bytes(300) == spec.kv_bytes(300) / 100
    assert scaled_spec(spec, 1e-9).kv_bytes(300) == 2 * 300 + 1
    assert scaled_spec(SPEC, 1.0) == SPEC


@pytest.mark.parametrize("bad", (0.0, -1.0, float("nan")))
def test_a_scale_is_above_zero(bad: float) -> None:
    with pytest.raises(InputError, match="time scale"):
        Scales(time=bad)
