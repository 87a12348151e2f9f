from __future__ import annotations

from pathlib import Path

from prfaas.config import load_deployment
from prfaas_lab.faults.clusters.layout import Layout
from prfaas_lab.faults.clusters.sizes import small_clusters

FILE = Path(__file__).parents[3] / "configs" / "two_by_two.toml"


def test_nodes_belong_to_clusters() -> None:
    layout = Layout(small_clusters(load_deployment(FILE)))
    assert layout.homes == ["east", "west"]
    assert layout.locals == ["east-0", "east-1", "east-2", "west-0", "west-1"]
    assert layout.remotes == ["north-0", "south-0"]
    assert layout.nodes_of("west") == ["west-0", "west-1"]


def test_faults_strike_all_clusters_in_turn() -> None:
    layout = Layout(small_clusters(load_deployment(FILE)))
    struck = []
    for _ in range(4):
        (first, *_) = layout.clusters("pd")
        layout.struck[first] += 1
        struck.append(first)
    assert struck == ["east", "west", "east", "west"]
    assert layout.clusters("prfaas") == ["north", "south"]
