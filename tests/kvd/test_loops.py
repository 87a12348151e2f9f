"""The kvd's own loops outlive a defect in one of their parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from prfaas.contracts.kvd_api import MatchPrefix
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.links import Links
from tests.kvd.hosts import kvd
from tests.waiting import wait_until


@pytest.mark.parametrize(
    ("part", "method"), [(IncomingTransfers, "sweep"), (Links, "sample")], ids=["sweep", "sample"]
)
def test_a_defect_in_the_sweep_leaves_the_kvd_alive(
    part: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def broken(*_: Any) -> None:
        calls.append(method)
        raise KeyError("a defect")

    monkeypatch.setattr(part, method, broken)
    with kvd(tmp_path) as here:
        wait_until(lambda: len(calls) >= 3)
        assert here.post("/v1/match", MatchPrefix(()))[0] == 200
