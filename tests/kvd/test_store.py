from __future__ import annotations

from prfaas.cache.lease import Lease
from prfaas.contracts.kvd_api import shapes_of
from prfaas.kvd.engine_socket.messages import Register
from prfaas.kvd.events import EventLog
from prfaas.kvd.store import Store, StoreOptions
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
