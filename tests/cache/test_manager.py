from __future__ import annotations

import pytest

from prfaas.cache.groups import rules_for
from prfaas.cache.hashing import PromptHashes
from prfaas.cache.hot import HotPrefixes
from prfaas.cache.index import NodeInfo, NodeMatch
from prfaas.cache.manager import ClusterMatch, CopyProposal, GlobalKVManager
from prfaas.types import BlockHash, ClusterId, Compat, HashEvent, NodeId
from tests.cache.builders import BLOCK, SPECS

SPEC = SPECS["hybrid"]
PD, FAAS = ClusterId("pd"), ClusterId("prfaas")
P0, P1, F0, F1, BIG = (NodeId(name) for name in ("p0", "p1", "f0", "f1", "big"))


def prompt(letters: str) -> PromptHashes:
    return PromptHashes([ord(x) for x in letters for _ in range(BLOCK)])


class Cluster:
    """A manager with two PD nodes and one PrfaaS node, and their sequence numbers."""

    def __init__(self) -> None:
        self.manager = GlobalKVManager(SPEC, HotPrefixes(half_life_s=10.0, threshold=2.0))
        self.seq: dict[NodeId, int] = {}
        for node, cluster in ((P0, PD), (P1, PD), (F0, FAAS)):
            self.manager.join(NodeInfo(node, cluster, BLOCK, rules_for(SPEC)))

    def store(self, node: NodeId, letters: str, states: int | None = None) -> None:
        """Attention blocks of the whole prompt, a state after `states` blocks (default: all)."""
        chain = prompt(letters).at(BLOCK)
        state = chain[(states or len(chain)) - 1]
        for group, hashes in (("full0", chain), ("linear0", [state])):
            seq = self.seq.get(node, 0)
            self.seq[node] = seq + 1
            assert self.manager.apply(HashEvent(seq, node, group, BLOCK, tuple(hashes), "stored"))
        self.manager.check()


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_cached_lengths_per_node_and_cluster(cluster: Cluster) -> None:
    cluster.store(P0, "ab")
    cluster.store(P1, "abcd", states=3)
    cluster.store(F0, "a")
    match = cluster.manager.match(prompt("abcdef"))
    assert match.nodes == {P0: NodeMatch(8, 8), P1: NodeMatch(12, 16), F0: NodeMatch(4, 4)}
    assert match.clusters == {PD: ClusterMatch(P1, 12, 16), FAAS: ClusterMatch(F0, 4, 4)}
    assert (match.clusters[PD].tokens, match.node_tokens(F0)) == (12, 4)
    assert match.lost_tokens == 4
    nothing = cluster.manager.match(prompt("xyz"))
    assert (nothing.clusters, nothing.node_tokens(P0), nothing.lost_tokens) == ({}, 0, 0)


def test_the_longest_attention_run_may_be_another_nodes(cluster: Cluster) -> None:
    cluster.store(P0, "ab")
    cluster.store(P1, "abcd", states=1)
    assert cluster.manager.match(prompt("abcd")).clusters[PD] == ClusterMatch(P0, 8, 16)


def test_a_node_that_vanishes_takes_its_entries_along(cluster: Cluster) -> None:
    cluster.store(P0, "ab")
    cluster.manager.leave(P0)
    assert cluster.manager.match(prompt("ab")).clusters == {}
    while cluster.manager.sweep():
        pass
    cluster.manager.check()


def test_a_snapshot_replaces_what_the_manager_has_missed(cluster: Cluster) -> None:
    event = HashEvent(4, P0, "full0", BLOCK, tuple(prompt("a").at(BLOCK)), "stored")
    assert not cluster.manager.apply(event)
    assert cluster.manager.snapshot(P0, {}, 4)
    assert cluster.manager.apply(event)
    assert cluster.manager.match(prompt("a")).nodes == {P0: NodeMatch(0, 4)}


def test_a_copy_says_what_from_where_to_where_and_how_much(cluster: Cluster) -> None:
    cluster.store(P0, "abcd")
    cluster.store(F0, "ab", states=1)
    asked = prompt("abcdef")
    copy = cluster.manager.propose_copy(asked, cluster.manager.match(asked), F0)
    assert copy is not None
    assert (copy.source, copy.target, copy.tokens, copy.skip_tokens) == (P0, F0, 16, 8)
    assert copy.hashes == tuple(asked.at(BLOCK)[:4])
    assert copy.nbytes == SPEC.kv_bytes(16, 8)
    assert copy.crosses_clusters


def test_no_copy_where_nobody_has_more(cluster: Cluster) -> None:
    cluster.store(P0, "ab")
    cluster.store(F0, "ab")
    asked = prompt("abc")
    assert cluster.manager.propose_copy(asked, cluster.manager.match(asked), F0) is None


def test_a_source_nearby_is_preferred(cluster: Cluster) -> None:
    cluster.store(F0, "ab")
    cluster.store(P0, "ab")
    asked = prompt("ab")
    copy = cluster.manager.propose_copy(asked, cluster.manager.match(asked), P1)
    assert copy is not None and copy.source == P0 and not copy.crosses_clusters
    cluster.manager.leave(F0)
    cluster.manager.join(NodeInfo(F0, FAAS, BLOCK, rules_for(SPEC)))
    cluster.manager.join(NodeInfo(F1, FAAS, BLOCK, rules_for(SPEC)))
    cluster.store(F1, "ab")
    copy = cluster.manager.propose_copy(asked, cluster.manager.match(asked), F0)
    assert copy is not None and copy.source == F1 and not copy.crosses_clusters


def test_another_block_size_is_no_source(cluster: Cluster) -> None:
    cluster.manager.join(NodeInfo(BIG, PD, 2 * BLOCK, rules_for(SPEC)))
    chain = tuple(prompt("abcd").at(2 * BLOCK))
    for seq, group in enumerate(("full0", "linear0")):
        cluster.manager.apply(HashEvent(seq, BIG, group, 2 * BLOCK, chain, "stored"))
    asked = prompt("abcd")
    match = cluster.manager.match(asked)
    assert match.clusters[PD].tokens == 16
    assert cluster.manager.propose_copy(asked, match, P0) is None


def ask_for(cluster: Cluster, *all_letters: str) -> None:
    for letters in all_letters:
        asked = prompt(letters)
        cluster.manager.observe(asked, cluster.manager.match(asked), 0.0)


def spread(
    cluster: Cluster, waits_s: dict[NodeId, float | None], now: float = 0.0, limit: int = 16
) -> list[CopyProposal]:
    living = [P0, P1, F0]
    return cluster.manager.replications(now, living, waits_s, saturated_s=1.0, limit=limit)


def test_hot_prefixes_leave_a_holder_that_is_too_busy(cluster: Cluster) -> None:
    cluster.store(P0, "ab")
    ask_for(cluster, "abx", "aby", "abz")
    (copy,) = spread(cluster, {P0: 3.0, P1: 0.5, F0: 0.0})
    assert (copy.source, copy.target, copy.tokens) == (P0, P1, 8)
    assert copy.hashes == tuple(prompt("ab").at(BLOCK)) and not copy.crosses_clusters
    assert spread(cluster, {P0: 1.0, P1: 0.0, F0: 0.0}) == [], "it does not make anybody wait long"
    assert spread(cluster, {P0: 3.0, P1: 1.5, F0: 0.0}) == [], "the other is as busy, nearly"
    assert spread(cluster, {P0: 3.0, P1: None}) == [], "the other does not prefill"
    assert spread(cluster, {P0: 3.0}) == [], "the other is not in use"
    assert spread(cluster, {P0: None, P1: 0.0}) == [], "a holder that does not prefill is no limit"
    assert spread(cluster, {P0: 3.0, P1: 0.0}, now=60.0) == [], "no longer hot"
    cluster.store(P1, "ab")
    assert spread(cluster, {P0: 3.0, P1: 0.0}) == [], "one holder has time"


def test_a_copy_is_taken_from_a_living_pool(cluster: Cluster) -> None:
    cluster.store(P0, "ab")
    cluster.store(F0, "ab")
    ask_for(cluster, "ab", "ab", "ab")
    waits_s: dict[NodeId, float | None] = {P0: 3.0, P1: 0.0}
    (copy,) = cluster.manager.replications(0.0, [F0], waits_s, saturated_s=1.0)
    assert (copy.source, copy.target, copy.crosses_clusters) == (F0, P1, True)
    assert cluster.manager.replications(0.0, [], waits_s, saturated_s=1.0) == []


def test_only_the_hottest_are_looked_at(cluster: Cluster) -> None:
    for letters in ("ab", "cd", "ef"):
        cluster.store(P0, letters)
        ask_for(cluster, letters, letters, letters)
    waits_s: dict[NodeId, float | None] = {P0: 2.0, P1: 0.0}
    assert len(spread(cluster, waits_s)) == 3
    assert len(spread(cluster, waits_s, limit=2)) == 2


def test_what_is_hot_leaves_before_its_node_does(cluster: Cluster) -> None:
    """Hottest first, to nodes that prefill, else to any node; not prefixes that others hold."""
    P2 = NodeId("p2")
    cluster.manager.join(NodeInfo(P2, PD, BLOCK, rules_for(SPEC)))
    for letters in ("ab", "cd", "ef"):
        cluster.store(P0, letters)
    ask_for(cluster, "ab", "ab", "cd", "cd", "cd", "ef")
    all_nodes = [P0, P1, P2, F0]

    def saved(waits_s: dict[NodeId, float | None]) -> list[tuple[NodeId, str]]:
        found = cluster.manager.evacuations([P0], 0.0, all_nodes, waits_s)
        names = {tuple(prompt(x).at(BLOCK)): x for x in ("ab", "cd", "ef")}
        assert all(copy.source == P0 for copy in found)
        return [(copy.target, names[copy.hashes]) for copy in found]

    assert saved({P0: 0.0, P1: 2.0, P2: 1.0, F0: 0.0}) == [(P2, "cd"), (P2, "ab")]
    assert saved({P0: None, P1: 2.0, P2: None}) == [(P1, "cd"), (P1, "ab")]
    assert saved({P0: 0.0, P2: None}) == [(P2, "cd"), (P2, "ab")]
    assert saved({P0: 0.0, F0: 0.0}) == [], "no node is left in its cluster"
    cluster.store(P1, "cd")
    assert saved({P0: 0.0, P1: 2.0, P2: 1.0}) == [(P2, "ab")]


def test_a_drained_cluster_leaves_its_hot_prefixes_to_targets_elsewhere(cluster: Cluster) -> None:
    """`f1` has other blocks, and cannot have the prefixes."""
    cluster.manager.join(NodeInfo(F1, FAAS, 2 * BLOCK, rules_for(SPEC)))
    other = NodeId("q0")
    cluster.manager.join(NodeInfo(other, ClusterId("pd-2"), BLOCK, rules_for(SPEC)))
    cluster.store(P0, "ab")
    cluster.store(P0, "cd")
    ask_for(cluster, *["ab"] * 4, *["cd"] * 6)
    waits_s: dict[NodeId, float | None] = {P0: 0.0, P1: 0.0, F0: 5.0, F1: 0.0, other: 0.0}

    def saved(*targets: NodeId) -> list[tuple[NodeId, tuple[BlockHash, ...], bool]]:
        found = cluster.manager.evacuations([P0], 0.0, list(waits_s), waits_s, targets)
        assert all(copy.source == P0 for copy in found)
        return [(copy.target, copy.hashes, copy.crosses_clusters) for copy in found]

    ab, cd = (tuple(prompt(letters).at(BLOCK)) for letters in ("ab", "cd"))
    assert saved(F0, other) == [(F0, cd, True), (F0, ab, True)], "the order counts, no wait does"
    assert saved(F1, other, F0) == [(other, cd, True), (other, ab, True)]
    assert saved(P0, P1) == [(P1, cd, False), (P1, ab, False)], "no prefix stays where it is"
    cluster.store(F0, "cd")
    assert saved(other, F0) == [(other, ab, True)], "one of the targets has the other prefix"
    assert saved(other) == [(other, cd, True), (other, ab, True)]
    assert saved() == []


# Nodes with two pools, and engines with caches of their own ---------------------------------------

CANONICAL = Compat("m", "1", "bfloat16", "float32", BLOCK, "canonical")
NATIVE = Compat("m", "1", "bfloat16", "float32", BLOCK, "vllm-a")
P2 = NodeId("p2")
SECOND = {node: NodeId(f"{node}/native") for node in (P0, P1, P2)}
WAITS: dict[NodeId, float | None] = {P0: 3.0, P1: 0.0, P2: 0.5}
IN_USE = {**WAITS, **{SECOND[node]: wait_s for node, wait_s in WAITS.items()}}


@pytest.fixture
def twins(cluster: Cluster) -> Cluster:
    """Every PD node has a canonical and a native pool with blocks of the same size."""
    for node in (P0, P1, P2):
        rules = rules_for(SPEC)
        cluster.manager.join(NodeInfo(node, PD, BLOCK, rules, CANONICAL))
        cluster.manager.join(NodeInfo(SECOND[node], PD, BLOCK, rules, NATIVE, node))
    return cluster


def proposed(twins: Cluster, waits_s: dict[NodeId, float | None]) -> list[CopyProposal]:
    return twins.manager.replications(0.0, list(waits_s), waits_s, saturated_s=1.0)


def test_a_copy_stays_within_a_format(twins: Cluster) -> None:
    twins.store(SECOND[P0], "abcd")
    asked = prompt("abcd")
    match = twins.manager.match(asked)
    assert twins.manager.propose_copy(asked, match, P1) is None, "equal hashes, other state"
    copy = twins.manager.propose_copy(asked, match, SECOND[P1])
    assert copy is not None
    assert (copy.source, copy.target, copy.compat, copy.tokens) == (P0, P1, NATIVE, 16)


def test_a_hot_prefix_of_a_second_pool_is_copied_to_a_second_pool(twins: Cluster) -> None:
    twins.store(SECOND[P0], "ab")
    ask_for(twins, "abx", "aby", "abz")
    (copy,) = proposed(twins, IN_USE)
    assert (copy.source, copy.target, copy.compat) == (P0, P1, NATIVE)


def test_a_node_that_has_the_prefix_in_any_form_needs_no_copy(twins: Cluster) -> None:
    for pool in (P0, SECOND[P0]):
        twins.store(pool, "ab")
    ask_for(twins, "abx", "aby", "abz")
    assert {copy.compat for copy in proposed(twins, IN_USE)} == {CANONICAL, NATIVE}
    twins.store(SECOND[P1], "ab")
    assert proposed(twins, IN_USE) == [], "one holder has time"
    busy = {**IN_USE, P1: 3.0, SECOND[P1]: 3.0}
    assert {copy.target for copy in proposed(twins, busy)} == {P2}


def test_a_prefix_leaves_with_its_node_once(twins: Cluster) -> None:
    pools = [P0, SECOND[P0]]
    for pool in pools:
        twins.store(pool, "ab")
    twins.store(SECOND[P0], "cd")
    ask_for(twins, *["ab"] * 4, *["cd"] * 3)
    found = twins.manager.evacuations(pools, 0.0, list(IN_USE), IN_USE)
    assert [(copy.source, copy.target, copy.compat) for copy in found] == [
        (P0, P1, CANONICAL),
        (P0, P1, NATIVE),
    ]
    twins.store(SECOND[P2], "ab")
    (copy,) = twins.manager.evacuations(pools, 0.0, list(IN_USE), IN_USE)
    assert copy.hashes == tuple(prompt("cd").at(BLOCK)), "the other one is kept, in another form"


def test_an_engines_own_cache_neither_is_a_source_nor_hides_its_pool(twins: Cluster) -> None:
    """A prefix is as hot as what can be copied of it."""
    engine = NodeId("engine")
    twins.manager.join(NodeInfo(engine, PD, BLOCK, rules_for(SPEC), owner=P0))
    twins.store(engine, "abcd")
    twins.store(P0, "ab")
    ask_for(twins, *["abcd"] * 4)
    (copy,) = proposed(twins, {**IN_USE, engine: 3.0})
    assert (copy.source, copy.target, copy.tokens) == (P0, P1, 8)
    asked = prompt("abcd")
    other = NodeId("other")
    twins.manager.join(NodeInfo(other, PD, BLOCK, rules_for(SPEC)))
    assert twins.manager.propose_copy(asked, twins.manager.match(asked), other) is None
