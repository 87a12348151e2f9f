from __future__ import annotations

import errno
import os
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from prfaas.cache.lease import Lease
from prfaas.config.address import parse_address
from prfaas.contracts.kvd_api import shapes_of
from prfaas.errors import InputError
from prfaas.kvd import store
from prfaas.kvd.engine_socket.messages import Register
from prfaas.kvd.events import EventLog
from prfaas.kvd.process import KvdOptions, run_kvd
from prfaas.kvd.store import OWN_BYTES, Store, StoreOptions
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
    """An engine that writes whole layers names no heads; the bytes are the same."""
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


def _options(folder: Path, memory_bytes: int) -> KvdOptions:
    return KvdOptions(
        socket=folder / "s",
        listen=parse_address("127.0.0.1:0", "listen", any_port=True),
        http=parse_address("127.0.0.1:0", "http", any_port=True),
        store=StoreOptions(memory_bytes=memory_bytes),
    )


def _registered() -> Store:
    made = Store(NodeId("pool"), StoreOptions(memory_bytes=MEMORY_BYTES), EventLog("instance"))
    made.take_memory()
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


async def test_a_strict_kernel_gives_the_memory_once_and_to_one_form(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "commits_strictly", lambda: True)
    made = _registered()
    assert made.first is not None
    further = Register("b", shapes_of(SPEC), BLOCK, msgspec.structs.replace(COMPAT, layout="rows"))
    with pytest.raises(InputError, match="strictly.*; let engines have one form"):
        made.register(further)
    taken = {os.fstat(one.fd).st_ino: os.fstat(one.fd).st_blocks * 512 for one in made.storages}
    assert sum(taken.values()) <= MEMORY_BYTES
    made.close()


async def test_a_kvd_takes_strict_memory_off_its_loop_and_before_engines_connect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loop serves transfers of gigabytes, and taking so many pages takes seconds."""
    threads = list[threading.Thread]()
    take = os.posix_fallocate

    def noted(*arguments: int) -> None:
        threads.append(threading.current_thread())
        assert not (tmp_path / "s").exists()
        take(*arguments)

    monkeypatch.setattr(store, "commits_strictly", lambda: True)
    monkeypatch.setattr(os, "posix_fallocate", noted)
    async with run_kvd(_options(tmp_path, MEMORY_BYTES)) as kvd:
        made = kvd.store.register(Register("engine", shapes_of(SPEC), BLOCK, COMPAT))
        assert os.fstat(made.fd).st_blocks * 512 >= made.arena.pages * made.arena.page_bytes
    assert len(threads) == 1 and threads[0] is not threading.main_thread()


@pytest.mark.parametrize(("left", "starts"), [(OWN_BYTES, True), (OWN_BYTES - 1, False)])
async def test_a_kvd_leaves_room_for_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, starts: bool
) -> None:
    monkeypatch.setattr(store, "memory_limit", lambda: MEMORY_BYTES + left)
    most = MEMORY_BYTES + left - OWN_BYTES
    refused = pytest.raises(InputError, match=f"{OWN_BYTES} itself, so that {most} are left")
    with nullcontext() if starts else refused:
        async with run_kvd(_options(tmp_path, MEMORY_BYTES)):
            pass


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
    with pytest.raises(InputError, match=f"{1 << 60} bytes .* may have .*give less memory"):
        async with run_kvd(_options(tmp_path, 1 << 60)):
            pass
