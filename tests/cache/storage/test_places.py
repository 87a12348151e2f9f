from __future__ import annotations

import os

import pytest

from prfaas.cache.lease import Lease
from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.places import segment_ranges
from prfaas.errors import InputError
from prfaas.kvspec import Segment
from tests.cache.builders import BLOCK, SPECS, hashes_of, layout_of, make_pool
from tests.cache.filling import expected, segments_to_resume, write

SPEC = SPECS["all"]
PROMPT = tuple(range(22))


def test_a_page_table_leads_to_the_same_bytes_as_the_pool() -> None:
    layout = layout_of(SPEC)
    fd = os.memfd_create("places")
    os.ftruncate(fd, 500 * layout.page_bytes)
    pool_side, engine_side = (Arena(fd, layout.page_bytes, 500) for _ in range(2))
    pool = make_pool(SPEC, pages=500, arena=pool_side)
    lease = pool.reserve(hashes_of(PROMPT), len(PROMPT), now=0.0)
    assert isinstance(lease, Lease)
    assert not pool.tables(lease.id).readable
    written = dict(pool.tables(lease.id).writable)
    write(pool, lease, PROMPT)
    pool.commit(lease.id, 0.0)
    tables = pool.tables(lease.id)
    assert (dict(tables.readable), dict(tables.writable)) == (written, {})
    for segment in segments_to_resume(pool, len(PROMPT)):
        ranges = segment_ranges(SPEC, BLOCK, engine_side, segment, tables.readable.get)
        found = b"".join(engine_side.view(start, stop) for start, stop in ranges)
        assert found == expected(pool, PROMPT, segment), segment.name
    with pytest.raises(InputError, match="not part of this lease"):
        segment_ranges(SPEC, BLOCK, engine_side, Segment("full0", 0, 24, 28), written.get)
    before = pool.occupancy()
    assert (before.leases, before.idle_pages, before.capacity_pages) == (1, 0, 500)
    pool.release(lease.id, 0.0)
    after = pool.occupancy()
    assert after.leases == 0 and after.used_pages == after.idle_pages < before.used_pages
    os.close(fd)
