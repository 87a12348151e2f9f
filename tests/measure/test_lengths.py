from __future__ import annotations

import pytest

from prfaas.errors import InputError
from prfaas.measure.lengths import parse_lengths
from prfaas.planner.workload import lognormal


def test_fixed_and_lognormal() -> None:
    fixed = parse_lengths("fixed:1000", output_tokens=7, where="x")
    assert (fixed.mean_new_tokens, fixed.output_tokens) == (1000, 7)
    found = parse_lengths("lognormal:5,1,10,900", output_tokens=3, where="x")
    assert found.mean_new_tokens == lognormal(5, 1, 10, 900, output_tokens=3).mean_new_tokens


def test_shares_of_several() -> None:
    found = parse_lengths("3*fixed:100 + 1*fixed:500", output_tokens=1, where="x")
    assert found.mean_new_tokens == pytest.approx(200)


@pytest.mark.parametrize(
    "text",
    ["", "fixed", "fixed:0", "fixed:1,2", "lognormal:1,1,5,4", "lognormal:1,-1,1,2", "0*fixed:1",
     "uniform:1,2", "fixed:1K"],
)  # fmt: skip
def test_mistakes_name_the_flag(text: str) -> None:
    with pytest.raises(InputError, match="--lengths.*write fixed:TOKENS"):
        parse_lengths(text, output_tokens=1, where="--lengths")
