from __future__ import annotations

import pytest

from prfaas_lab.faults.episode import FaultResult
from tests.faults.report import BEGIN, END, written

SEEN = FaultResult("wan-cut", "WAN cut", {"right": 5, "broken": 1}, 3, 8.04, 12.78)


def test_the_table_is_made_anew_between_its_marks() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    once = written(text, {"emulated": [SEEN]})
    assert once.startswith(f"before\n{BEGIN}\n| fault |") and once.endswith(f"{END}\nafter\n")
    assert "| WAN cut | emulated | 5 right, 1 broken | 3 | 8 s | 12.8 s |" in once
    assert "old" not in once and written(once, {"emulated": [SEEN]}) == once


def test_a_file_without_marks_is_refused() -> None:
    with pytest.raises(AssertionError, match="campaign"):
        written("no table here", {})
