"""What `bench/canonical_bytes.py` and `conversion_cost` make of what they have seen."""

from __future__ import annotations

import numpy as np
import pytest

from prfaas.errors import InputError
from prfaas.kvspec import GQA, Linear, Segment
from tests.benches import bench

canonical_bytes = bench("canonical_bytes")
conversion_cost = bench("conversion_cost")

GEOMETRIES = (
    GQA((0, 1), kv_heads=2, k_dim=2, v_dim=3),
    Linear((2,), k_heads=1, v_heads=1, k_dim=2, v_dim=2, conv_kernel=3),
)
MEANING = canonical_bytes.Meaning(GEOMETRIES, kv_dtype="bfloat16", state_dtype="float32")
TOKENS = 3
CONV_CHANNELS = 6  # queries, keys and values


def bfloat16(values: list[float]) -> bytes:
    return (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def state() -> dict[Segment, bytes]:
    row = [1.0, 2.0, 3.0, 4.0, *(8.0 * n for n in range(6))]  # keys, then values
    rows = bfloat16(row * TOKENS)
    linear = np.array([1, -2, 4, 0.5], np.float32).tobytes() + bfloat16([1.0] * 2 * CONV_CHANNELS)
    return {
        Segment("full0", 0, 0, TOKENS): rows,
        Segment("full0", 1, 0, TOKENS): rows,
        Segment("linear0", 2, 0, TOKENS): linear,
    }


def compared(changed: dict[Segment, bytes]) -> dict[str, dict[str, float]]:
    comparison = canonical_bytes.Comparison()
    comparison.add(MEANING, state(), changed)
    found: dict[str, dict[str, float]] = comparison.as_dict()
    return found


def test_equal_states_are_equal_in_every_role() -> None:
    found = compared(state())
    assert found["bit_equal"] == dict.fromkeys(("keys", "values", "state", "conv"), True)
    assert not found["first_layer"] and not any(found["difference"].values())


@pytest.mark.parametrize(
    ("segment", "element", "role", "difference"),
    [
        (Segment("full0", 1, 0, TOKENS), 10 + 1, "keys", 0.5),  # of the second token: 2 becomes 4
        (Segment("full0", 0, 0, TOKENS), 9, "values", 1.0),  # 40 becomes 80
        (Segment("linear0", 2, 0, TOKENS), 8 + 3, "conv", 1.0),  # after four elements of float32
    ],
)
def test_an_unequal_element_is_found_in_its_role(
    segment: Segment, element: int, role: str, difference: float
) -> None:
    changed = state()
    elements = np.frombuffer(changed[segment], np.uint16).copy()
    elements[element] += 0x80  # twice the value
    changed[segment] = elements.tobytes()
    found = compared(changed)
    assert [name for name, equal in found["bit_equal"].items() if not equal] == [role]
    assert found["first_layer"] == {role: segment.layer}
    assert found["difference"][role] == pytest.approx(difference)


def test_states_of_other_segments_are_not_compared() -> None:
    less = state()
    less.popitem()
    with pytest.raises(InputError, match="other segments"):
        compared(less)


def turn(prefill_s: float, worker_s: float, copy_s: float) -> dict[str, float]:
    found = {"prefill": prefill_s, "worker": worker_s, "copy": copy_s, "scheduler": 0.0}
    both = {f"{name}{kind}": s for name, s in found.items() for kind in ("_s", "_cpu_s")}
    return {**both, "sent_bytes": 100}


def test_the_cost_is_a_share_of_the_prefill_of_the_same_turn() -> None:
    turns = conversion_cost.Turns()
    for slower in (1.0, 3.0, 2.0):  # the machine, in all engines alike
        turns.add("none", {"prefill_s": slower, "prefill_cpu_s": slower})
        turns.add("native", turn(1.1 * slower, 0.1 * slower, 0.05 * slower))
        turns.add("canonical", turn(1.2 * slower, 0.2 * slower, 0.15 * slower))
        turns.add("native_before", turn(1.0 * slower, 0.1 * slower, 0.05 * slower))
    found = turns.as_dict()
    assert found["canonical"]["share"] == pytest.approx(1 / 6, abs=1e-4)
    assert found["canonical"]["against_none"] == pytest.approx(1.2)
    assert found["conversion_cpu_share"] == pytest.approx(0.1 / 1.2, abs=1e-4)
    assert found["native_against_before"] == pytest.approx(1.1)
