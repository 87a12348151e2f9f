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


@pytest.mark.parametrize(("first", "second"), [(1, 4), (4, 1), (4, 4), (1, 1)])
async def test_engines_that_name_heads_and_those_that_do_not_share_a_pool(
    first: int, second: int
) -> None:
    """An engine of an earlier version names no heads; the bytes are the same."""
    made = Store(NodeId("pool"), StoreOptions(memory_bytes=MEMORY_BYTES), EventLog("instance"))
    before = made.register(Register("a", shapes_of(_with_heads(first)), BLOCK, COMPAT))
    after = made.register(Register("b", shapes_of(_with_heads(second)), BLOCK, COMPAT))
    assert (after.pool, after.arena) == (before.pool, before.arena)
    assert made.storage is not None and made.storage.spec == _with_heads(max(first, second))
    with pytest.raises(InputError, match="groups: .*heads=.* here, .*heads=8.* there"):
        if max(first, second) == 1:
            made.register(Register("c", shapes_of(_with_heads(4)), BLOCK, COMPAT))
        made.register(Register("d", shapes_of(_with_heads(8)), BLOCK, COMPAT))
    made.close()
