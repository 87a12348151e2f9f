"""What is served without a PrfaaS cluster, against figures worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from prfaas.planner.comparison import compare
from prfaas.planner.lost_sites import LostSite, lost_sites, served
from prfaas.planner.network.comparison import compare as compare_network
from prfaas.planner.network.problem import Home, NetworkProblem
from prfaas.planner.problem import Problem
from prfaas.planner.workload import Workload
from tests.planner.builders import case_study, problem

# A prefill takes 0.5 s on the PrfaaS cluster and 1.4 s on a PD node, which decodes in 0.5 s.
WORK = Workload(np.array([1000.0]), np.zeros(1), np.ones(1), output_tokens=100)


def given(pd: int, prfaas: int = 4, **changes: object) -> Problem:
    return problem(WORK, pd=pd, prfaas=prfaas, bps=1e12, **changes)  # type: ignore[arg-type]


def lost(subject: Problem) -> LostSite:
    (found,) = compare(subject, "exact").lost_sites
    return found


def test_one_node_serves_alone() -> None:
    found = lost(given(1))
    assert found.in_words == (
        "Without far or its link: 0.53 requests/s of 2.00 (26%): the only node prefills and "
        "decodes its own requests."
    )
    assert found.as_dict() == {
        "cluster": "far",
        "rate_rps": pytest.approx(1 / 1.9),
        "share": pytest.approx(1 / 1.9 / 2),
        "pd_clusters": [{"cluster": "near", "split": {"prefill": 0, "decode": 1}, "alone": True}],
    }


def test_decode_nodes_become_prefill_nodes() -> None:
    """With 20 PrfaaS nodes, which prefill 40 requests/s, all 19 nodes decode."""
    found = lost(given(19, prfaas=20))
    assert (found.homes[0].n_prefill, found.homes[0].n_decode) == (14, 5)
    assert found.in_words == (
        "Without far or its link: 10.00 requests/s of 38.00 (26%): 14 decode nodes become prefill "
        "nodes."
    )


def test_a_fixed_split_keeps_its_roles() -> None:
    assert lost(given(19, fixed_prefill=14)).homes[0].in_words == "all nodes keep their roles"


def test_the_other_prfaas_clusters_go_on() -> None:
    one = given(2, prfaas=3)
    second = replace(one.remotes[0], pool=replace(one.remotes[0].pool, cluster="second"))
    both = replace(one, remotes=(*one.remotes, second))
    found = compare(both, "exact")
    assert [site.cluster for site in found.lost_sites] == ["far", "second"]
    alone = compare(one, "exact").prfaas_pd.lambda_max_rps
    assert [site.rps for site in found.lost_sites] == [pytest.approx(alone)] * 2


def test_more_alone_than_with_a_split_that_does_not_fit() -> None:
    """A link that carries next to nothing: one of two nodes prefills, 1 / 1.4 requests/s."""
    subject = replace(given(2), remotes=(replace(given(2).remotes[0], path=SLOW),))
    found = lost(subject)
    assert found.full_rps == pytest.approx(1 / 1.4, rel=1e-3)
    assert "1.05 requests/s, no less than with it" in found.in_words


SLOW = replace(given(2).remotes[0].path, bps=100.0)


def test_a_deployment_in_words() -> None:
    words = served(given(1)).in_words.splitlines()
    assert words[0] == "Planned for 2.00 requests/s: no prefill nodes and 1 decode node at near."
    assert words[1].startswith("Without far")
    lone = served(given(1, prfaas=0))
    assert lone.rps == pytest.approx(1 / 1.9) and lone.lost_sites == ()
    assert "the only node prefills and decodes" in lone.in_words


def test_without_prfaas_clusters_none_is_lost() -> None:
    assert compare(given(4, prfaas=0), "paper").lost_sites == ()


def test_the_case_study() -> None:
    """Of 8 nodes 6 prefill then, and 3 do with the PrfaaS cluster."""
    found = lost(case_study())
    assert (found.homes[0].n_prefill, found.homes[0].n_decode) == (6, 2)
    without = replace(case_study(), remotes=())
    assert found.rps == compare(without, "exact").prfaas_pd.lambda_max_rps


def several(shares: tuple[float, float], pds: tuple[int, int], linked: int) -> NetworkProblem:
    """Two PD clusters; the PrfaaS cluster has a link to the first `linked` of them."""
    homes = []
    for number, (share, pd) in enumerate(zip(shares, pds, strict=True)):
        one = given(pd)
        pool = replace(one.local.pool, cluster=f"home{number}")
        remotes = one.remotes if number < linked else ()
        homes.append(
            Home(share, replace(one, remotes=remotes, local=replace(one.local, pool=pool)))
        )
    return NetworkProblem(tuple(homes))


def test_of_several_pd_clusters_the_slowest_for_its_share_limits_all() -> None:
    found = compare_network(several((0.5, 0.5), (1, 19), 2), "exact")
    (site,) = found.lost_sites
    # The first serves 1 / 1.9 alone, half of the total; the other keeps up with it.
    assert site.rps == pytest.approx(2 / 1.9)
    assert site.full_rps == found.plan.rate_rps
    assert [(home.cluster, home.alone) for home in site.homes] == [
        ("home0", True),
        ("home1", False),
    ]
    assert "at home0 the only node prefills and decodes its own requests; at home1 " in (
        site.in_words
    )


def test_pd_clusters_without_a_link_to_the_lost_one_are_not_named() -> None:
    found = compare_network(several((0.5, 0.5), (1, 19), 1), "exact")
    (site,) = found.lost_sites
    assert [home.cluster for home in site.homes] == ["home0"]
    assert site.rps == pytest.approx(2 / 1.9)


def test_one_pd_cluster_in_a_network_is_one_alone() -> None:
    for subject in (case_study(), given(1), given(2), given(19)):
        (one,) = compare(subject, "exact").lost_sites
        (same,) = compare_network(NetworkProblem((Home(1.0, subject),)), "exact").lost_sites
        assert same.rps == pytest.approx(one.rps)
        assert same.homes == one.homes


def test_lost_sites_are_those_of_the_reading() -> None:
    subject = case_study()
    paper = compare(subject, "paper")
    assert paper.lost_sites[0].full_rps == paper.prfaas_pd.lambda_max_rps
    assert paper.lost_sites[0].rps > compare(subject, "exact").lost_sites[0].rps
    assert lost_sites(replace(subject, remotes=()), None, 1.0, 0) == ()  # type: ignore[arg-type]
