from __future__ import annotations

from prfaas.cache.hashing import PromptHashes
from prfaas.testing.clock import FakeClock
from prfaas.types import ClusterId, HashEvent, NodeId
from tests.gateway.backends import FAR, prompt
from tests.gateway.fleets import F, fleet_and_router, member_of
from tests.gateway.reports import report

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
