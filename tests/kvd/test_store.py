from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.cache.lease import Lease
from prfaas.contracts.kvd_api import shapes_of
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.messages import Register
from prfaas.kvd.events import EventLog
from prfaas.kvd.store import Store, StoreOptions
from prfaas.kvspec import KVSpec
from prfaas.types import NodeId
from tests.cache.builders import BLOCK
from tests.kvd.hosts import COMPAT, MEMORY_BYTES, SPEC


async def test_leases_of_two_stores_have_different_ids() -> None:
    """A restarted kvd makes a new store; a lease of the old one must not be valid there."""
    ids = set()
    for _ in range(2):
        made = Store(NodeId("pool"), StoreOptions(memory_bytes=MEMORY_BYTES), EventLog("instance"))
        pool = made.register(Register("engine", shapes_of(SPEC), BLOCK, COMPAT)).pool
        lease = pool.pin([], now=0.0)
        assert isinstance(lease, Lease)
        ids.add(lease.id)
        made.close()
    assert len(ids) == 2


def _with_heads(heads: int) -> KVSpec:
    return KVSpec(tuple(replace(group, heads=heads) for group in SPEC.groups))


@pytest.mark.parametrize(("first", "second"), [(4, 1), (4, 4), (1, 1)])
async def test_an_engine_that_names_no_heads_shares_a_pool_with_one_that_does(
    first: int, second: int
) -> None:
    """An engine of an earlier version names no heads; the bytes are the same."""
    made = Store(NodeId("pool"), StoreOptions(memory_bytes=MEMORY_BYTES), EventLog("instance"))
    before = made.register(Register("a", shapes_of(_with_heads(first)), BLOCK, COMPAT))
    after = made.register(Register("b", shapes_of(_with_heads(second)), BLOCK, COMPAT))
    assert after is before and before.spec == _with_heads(first)
    made.close()


@pytest.mark.parametrize(("first", "second"), [(4, 8), (1, 4)])
async def test_other_heads_are_refused_and_change_nothing(first: int, second: int) -> None:
    """The number of heads of one engine is not decided by another one."""
    made = Store(NodeId("pool"), StoreOptions(memory_bytes=MEMORY_BYTES), EventLog("instance"))
    made.register(Register("a", shapes_of(_with_heads(first)), BLOCK, COMPAT))
    with pytest.raises(InputError, match=f"groups: .*here, .*heads={second}.* there.*restart"):
        made.register(Register("b", shapes_of(_with_heads(second)), BLOCK, COMPAT))
    assert made.first is not None and made.first.spec == _with_heads(first)
    made.close()
