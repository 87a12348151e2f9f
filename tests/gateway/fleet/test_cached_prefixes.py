from __future__ import annotations

from prfaas.cache.hashing import PromptHashes
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.types import ClusterId, HashEvent, NodeId
from prfaas_lab.testing.clock import FakeClock
from tests.gateway.backends import FAR, prompt
from tests.gateway.fleets import A, B, C, F, fleet_and_router, member_of
from tests.gateway.reports import add_native, compat, native_compat, report

ENGINE = NodeId("f/engine")
PROMPT = PromptHashes(prompt(640))


def test_an_engines_cache_counts_for_its_node() -> None:
    clock = FakeClock()
    fleet, _ = fleet_and_router(clock)
    far = member_of(fleet, F)
    assert fleet.prefixes.add(far, F) and fleet.prefixes.add(far, ENGINE)
    hashes = PROMPT.at(64)
    for name, blocks in ((F, 2), (ENGINE, 5)):
        held = hashes[:blocks]
        for seq, (group, names) in enumerate({"full": held, "state": held[-1:]}.items()):
            assert fleet.manager.apply(HashEvent(seq, name, group, 64, tuple(names), "stored"))
    found = fleet.prefixes.by_node(fleet.manager.match(PROMPT))
    assert set(found) == {F}
    assert found[F].tokens == 5 * 64, "the engine resumes there"
    assert found[F].attention_tokens == 2 * 64, "the kvd can hand off these"
    assert found[F].pool_tokens == found[F].remote_pool_tokens == 2 * 64, (
        "other nodes can copy these"
    )
    fleet.prefixes.remove(F)
    assert not fleet.prefixes.by_node(fleet.manager.match(PROMPT))


def test_a_member_without_a_pool_is_not_indexed_yet() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    new = fleet.register("http://n:2", ClusterId(FAR))
    assert new is not None and not fleet.prefixes.add(new, NodeId("n"))
    fleet.record_report(new, report("n", registered=False))
    assert not fleet.prefixes.add(new, NodeId("n"))
    fleet.record_report(new, report("n"))
    assert fleet.prefixes.add(new, NodeId("n"))


# Second pools -------------------------------------------------------------------------------------

SECOND = {node: NodeId(f"{node}/native") for node in (A, B, C, F)}


def store(fleet: Fleet, node: NodeId, name: NodeId, tokens: int) -> None:
    """Events under this name: the first or the second pool of the node has so many tokens."""
    assert fleet.prefixes.add(member_of(fleet, node), name)
    size, groups = (16, ("blocks", "slots")) if name == SECOND[node] else (64, ("full", "state"))
    chain = PROMPT.at(size)[: tokens // size]
    for seq, (group, held) in enumerate(zip(groups, (chain, chain[-1:]), strict=True)):
        assert fleet.manager.apply(HashEvent(seq, name, group, size, tuple(held), "stored"))


def test_every_pool_counts_for_its_node() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    add_native(fleet, A, B, C, F)
    store(fleet, A, A, 128)
    store(fleet, A, SECOND[A], 336)
    store(fleet, B, SECOND[B], 80)
    found = fleet.prefixes.by_node(fleet.manager.match(PROMPT))
    assert {node: match.tokens for node, match in found.items()} == {A: 336, B: 80}
    assert found[A].attention_tokens == 336
    assert found[A].pool_tokens == found[A].remote_pool_tokens == 336
    fleet.prefixes.remove(A)
    assert set(fleet.prefixes.by_node(fleet.manager.match(PROMPT))) == {B}


def test_only_nodes_with_its_format_copy_from_a_second_pool() -> None:
    """The nodes at home are equal, and the remote one is another engine."""
    fleet, _ = fleet_and_router(FakeClock())
    add_native(fleet, A, B, C)
    add_native(fleet, F, layout="vllm-b")
    for node in (A, F):
        store(fleet, node, node, 128)
        store(fleet, node, SECOND[node], 336)
    found = fleet.prefixes.by_node(fleet.manager.match(PROMPT))
    assert (found[A].pool_tokens, found[A].remote_pool_tokens) == (336, 128)
    assert (found[F].pool_tokens, found[F].remote_pool_tokens) == (336, 128)
    fleet.record_report(member_of(fleet, B), report("b", instance="second"))
    found = fleet.prefixes.by_node(fleet.manager.match(PROMPT))
    assert found[A].pool_tokens == 128, "the router may choose b, which has the first form only"


def test_a_node_without_the_format_makes_a_second_pool_unusable_for_routes() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    add_native(fleet, A, B)
    store(fleet, A, SECOND[A], 336)
    found = fleet.prefixes.by_node(fleet.manager.match(PROMPT))
    assert found[A].tokens == 336, "its own engine resumes there"
    assert (found[A].pool_tokens, found[A].remote_pool_tokens) == (0, 0), "the router may choose c"


def test_a_copy_uses_the_format_in_which_most_can_be_copied() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    add_native(fleet, A, B)
    store(fleet, A, A, 128)
    store(fleet, A, SECOND[A], 336)
    match, members = fleet.manager.match(PROMPT), [member_of(fleet, node) for node in (A, B, C)]
    a, b, c = members
    assert fleet.prefixes.choose_copy(a, b, match, 336) == (native_compat(), 336)
    assert fleet.prefixes.choose_copy(a, b, match, 100) == (compat(), 64)
    assert fleet.prefixes.choose_copy(a, c, match, 336) == (compat(), 128)
    assert fleet.prefixes.choose_copy(b, a, match, 336) == (compat(), 320), "not in the index yet"
    fleet.record_report(c, report("c", instance="second", revision="2"))
    assert fleet.prefixes.choose_copy(a, c, match, 336) is None


def test_the_name_of_a_second_pool_belongs_to_its_node() -> None:
    """An engine of another member has taken it, before or after the node has joined."""
    fleet, _ = fleet_and_router(FakeClock())
    thief, name = member_of(fleet, C), NodeId("n/native")
    assert fleet.prefixes.add(thief, name), "no node has this name yet"
    new = fleet.register("http://n:2", ClusterId(FAR))
    assert new is not None
    fleet.record_report(new, report("n", native="vllm-a"))
    assert fleet.prefixes.add(new, name) and fleet.prefixes.owns(new, name)
    assert not fleet.prefixes.owns(thief, name) and not fleet.prefixes.add(thief, name)
    fleet.prefixes.forget(thief, name)
    assert fleet.prefixes.owns(new, name)
    assert not fleet.prefixes.add(thief, SECOND[A]), "also while its node has no such pool"


def test_a_nodes_own_name_takes_precedence_over_a_second_pools() -> None:
    fleet, _ = fleet_and_router(FakeClock())
    add_native(fleet, A)
    assert fleet.prefixes.add(member_of(fleet, A), SECOND[A])
    new = fleet.register("http://n:2", ClusterId(FAR))
    assert new is not None
    fleet.record_report(new, report(SECOND[A]))
    assert fleet.prefixes.add(new, SECOND[A])
    assert not fleet.prefixes.owns(member_of(fleet, A), SECOND[A])
    assert not fleet.prefixes.add(member_of(fleet, A), SECOND[A])
