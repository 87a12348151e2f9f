from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from prfaas.cache.lease import Lease
from prfaas.contracts.kvd_api import GroupShape, shapes_of
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.messages import Register
from prfaas.kvd.events import EventLog
from prfaas.kvd.store import Store, StoreOptions
from prfaas.types import NodeId
from tests.cache.builders import BLOCK
from tests.kvd.hosts import COMPAT, MEMORY_BYTES, SPEC

REGISTER = Register("engine", shapes_of(SPEC), BLOCK, COMPAT)
FULL = GroupShape("full", "full", (0, 1), 8)


def store(**options: object) -> Store:
    settings = StoreOptions(**{"memory_bytes": MEMORY_BYTES, **options})  # type: ignore[arg-type]
    return Store(NodeId("pool"), settings, EventLog("instance"))


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    ("groups", "where"),
    [
        ((), "groups"),
        ((FULL, FULL), r"groups\[1\]"),
        ((GroupShape("full", "", (0,), 8),), r"groups\[0\]"),
        ((GroupShape("full", "a", (), 8),), r"groups\[0\]"),
        ((GroupShape("full", "a", (-1,), 8),), r"groups\[0\]"),
        ((GroupShape("full", "a", (1, 1), 8),), r"groups\[0\]"),
        ((GroupShape("linear", "a", (0,), 0),), r"groups\[0\]"),
        ((GroupShape("linear", "a", (0,), 1 << 60),), r"groups\[0\]"),
        ((GroupShape("window", "a", (0,), 8),), r"groups\[0\]"),
    ],
)
@pytest.mark.parametrize("first", [True, False])
async def test_groups_that_no_model_has_are_refused(
    groups: tuple[GroupShape, ...], where: str, first: bool
) -> None:
    made = store()
    if not first:
        made.register(REGISTER)
    with pytest.raises(InputError, match=where):
        made.register(msgspec.structs.replace(REGISTER, groups=groups))
    made.register(REGISTER)
    made.close()


@pytest.mark.parametrize(
    "options",
    [
        {"ssd": Path("/nonexistent/folder/file")},
        {"checkpoints": "every:x"},
        {"memory_bytes": 1},
    ],
)
async def test_a_registration_that_fails_keeps_no_file_open(options: dict[str, object]) -> None:
    made = store(**options)
    before = descriptors()
    for _ in range(2):
        with pytest.raises(InputError):
            made.register(REGISTER)
    assert descriptors() == before
    made.close()


async def test_leases_of_two_stores_have_different_ids() -> None:
    """A restarted kvd makes a new store; a lease of the old one must not be valid there."""
    ids = set()
    for _ in range(2):
        made = store()
        pool = made.register(REGISTER).pool
        lease = pool.pin([], now=0.0)
        assert isinstance(lease, Lease)
        ids.add(lease.id)
        made.close()
    assert len(ids) == 2
