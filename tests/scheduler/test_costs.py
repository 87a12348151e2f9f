from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.kvspec import FullAttention, KVSpec, LinearState, SlidingWindow
from prfaas.planner.profile import PrefillProfile, PrefillTime
from prfaas.scheduler.costs import build_costs
from tests.planner.builders import FAST, problem
from tests.scheduler.views import COSTS, FAR, NEAR

PREFIXED = PrefillProfile(
    [
        PrefillTime(new, cached, 0.1 + new * 1e-4 + new * cached * 1e-8)
        for new in (100, 1000, 10_000)
        for cached in (0, 4000, 20_000)
    ],
    provenance="measured: test",
)


MIXED = KVSpec(
    (
        FullAttention("full0", (0,), 100),
        SlidingWindow("window0", (1, 2), 10, 128),
        LinearState("linear0", (3,), 5000),
    )
)
MIXED_COSTS = build_costs(replace(problem(), spec=MIXED), 500)
TABLES = {profile: profile.table(5000) for profile in (FAST, PREFIXED)}


@given(st.integers(1, 6000), st.integers(0, 50_000), st.sampled_from([FAST, PREFIXED]))
def test_a_table_agrees_with_its_profile(new: int, cached: int, profile: PrefillProfile) -> None:
    table = TABLES[profile]
    assert table.seconds(new, cached) == pytest.approx(float(profile.seconds(new, cached)))


@given(st.integers(1, 400), st.integers(0, 400))
def test_bytes_are_the_specs(tokens: int, held: int) -> None:
    lacking = max(0, tokens - held)
    assert MIXED_COSTS.handoff_bytes(tokens, lacking) == MIXED.kv_bytes(tokens, min(held, tokens))


def test_fabrics() -> None:
    assert COSTS.fabric_bps(NEAR) == 1e10
    assert np.isinf(COSTS.fabric_bps(FAR)), "not stated: costs nothing"
