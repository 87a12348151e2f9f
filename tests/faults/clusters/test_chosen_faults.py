from __future__ import annotations

import pytest

from prfaas.errors import InputError
from prfaas_lab.faults.catalogue import FAULTS
from prfaas_lab.faults.clusters.catalogue import (
    CLUSTER_FAULTS,
    choose_faults,
    draw_from,
    faults_of,
    is_cluster_wide,
)


def test_cluster_wide_faults_strike_only_where_there_are_several_pd_clusters() -> None:
    assert choose_faults((), 1) == list(FAULTS)
    several = choose_faults((), 2)
    assert {fault.name for fault in several} >= {fault.name for fault in CLUSTER_FAULTS}
    assert "gateway-killed" not in {fault.name for fault in several}
    assert [fault.name for fault in choose_faults(["wan-cut"], 2)] == ["wan-cut"]


@pytest.mark.parametrize(("name", "pd_clusters"), [("planner-killed", 1), ("gateway-killed", 2)])
def test_a_fault_that_the_deployment_cannot_have_is_refused(name: str, pd_clusters: int) -> None:
    with pytest.raises(InputError, match=name) as refused:
        choose_faults(["wan-cut", name], pd_clusters)
    text = str(refused.value)
    assert "--fault" in text and all(fault.name in text for fault in faults_of(pd_clusters))


def test_a_cluster_wide_fault_strikes_first() -> None:
    possible = choose_faults((), 2)
    first = draw_from(possible, [])
    assert list(first) == list(CLUSTER_FAULTS)
    assert draw_from(possible, ["wan-cut"]) == first
    assert draw_from(possible, ["wan-cut", first[0].name]) == possible
    others = [fault for fault in possible if not is_cluster_wide(fault.name)]
    assert draw_from(others, []) == others, "all of them are being repaired, or none is wanted"
