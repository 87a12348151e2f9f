from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from prfaas.cache.lease import Lease
from prfaas.config.address import parse_address
from prfaas.contracts.kvd_api import shapes_of
from prfaas.errors import InputError
from prfaas.kvd import store
from prfaas.kvd.engine_socket.messages import Register
from prfaas.kvd.events import EventLog
from prfaas.kvd.process import KvdOptions, run_kvd
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


def _registered() -> Store:
    made = Store(NodeId("pool"), StoreOptions(memory_bytes=MEMORY_BYTES), EventLog("instance"))
    made.register(Register("engine", shapes_of(SPEC), BLOCK, COMPAT))
    return made


async def test_a_strict_kernel_gives_all_pages_of_the_arena_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A page that it could not give later would be a SIGBUS of the process that touches it."""
    monkeypatch.setattr(store, "commits_strictly", lambda: True)
    made = _registered()
    assert made.first is not None
    status = os.fstat(made.first.fd)
    assert status.st_blocks * 512 >= status.st_size > 0
    made.close()


async def test_an_arena_without_memory_names_its_size_and_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(store, "commits_strictly", lambda: True)
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(InputError, match=r"an arena of \d+ bytes .*No space.*give less memory"):
        _registered()


async def test_a_kvd_with_more_memory_than_there_is_does_not_start(tmp_path: Path) -> None:
    options = KvdOptions(
        socket=tmp_path / "s",
        listen=parse_address("127.0.0.1:0", "listen", any_port=True),
        http=parse_address("127.0.0.1:0", "http", any_port=True),
        store=StoreOptions(memory_bytes=1 << 60),
    )
    with pytest.raises(InputError, match=f"{1 << 60} bytes .* may have .*give less memory"):
        async with run_kvd(options):
            pass
