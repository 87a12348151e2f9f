"""`bench gpu` runs on a CPU, checks its bytes, and uses an arena that is fragmented."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")

from prfaas.device.staging import StagingRing
from tests.benches import bench


def measured() -> Any:
    return bench("gpu").measure("cpu", "bfloat16", small=True)


def test_every_case_is_exact_in_a_fresh_and_in_a_fragmented_arena() -> None:
    result = measured()
    found = {(case["case"], case.get("arena")): case for case in result["cases"]}
    names = ("segments", "latent", "states", "latent1", "states1", "blocks16k", "blocks32k")
    assert list(found) == [(name, arena) for name in names for arena in ("fresh", "fragmented")]
    for case in found.values():
        assert case["exact"], case
        assert case["out_GBps"] >= 0 and case["in_GBps"] >= 0 and case["bytes_per_copy"] > 0
    for name in names:
        fresh, fragmented = found[name, "fresh"], found[name, "fragmented"]
        assert fresh["pages_per_run"] > fragmented["pages_per_run"] > 0
        assert fresh["bytes_per_copy"] >= fragmented["bytes_per_copy"]


def test_a_copy_that_loses_bytes_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_write(ring: StagingRing, chunk: Any) -> int:
        for page in chunk.pages[-1:]:
            chunk = chunk._replace(pages=(*chunk.pages[:-1], memoryview(bytearray(page.nbytes))))
        return whole(ring, chunk)

    whole = StagingRing.end_write
    monkeypatch.setattr(StagingRing, "end_write", end_write)
    assert [case["exact"] for case in measured()["cases"]] == [False] * 14
