from __future__ import annotations

from prfaas.scheduler.lookup.prefixes import NOTHING_CACHED, CachedPrefix, group_prefixes
from prfaas.types import NodeId
from tests.scheduler.views import Hit

A, B, C, D = (NodeId(name) for name in "abcd")


def test_nodes_that_hold_the_same_are_one_group() -> None:
    held: dict[NodeId, CachedPrefix] = {A: Hit(64, 128), C: Hit(64, 128), D: Hit(64, 64)}
    found = group_prefixes(held, {A: 3, B: 2, C: 1, D: 0})
    assert found.groups == ((Hit(64, 128), 0b1010), (Hit(64, 64), 0b0001))
    assert dict(found) == held and B not in found and found.get(B) is None


def test_unknown_nodes_do_not_count() -> None:
    found = group_prefixes({A: Hit(64, 64), B: Hit(64, 64)}, {B: 0})
    assert dict(found) == {B: Hit(64, 64)}
    assert not NOTHING_CACHED and group_prefixes({}) is NOTHING_CACHED
