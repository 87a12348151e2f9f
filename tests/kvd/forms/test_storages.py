"""The storages of two forms: which registrations make them, and how they share memory."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prfaas.cache.lease import Lease
from prfaas.cache.storage.budget import GUARANTEED_PARTS
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.messages import Register
from prfaas.kvd.events import EventLog
from prfaas.kvd.store import Storage, Store, StoreOptions
from prfaas.types import Form, NodeId, NotNow
from tests.kvd.forms.engines import COMPATS, FORMS, NATIVE, SPECS, register
from tests.kvd.hosts import COMPAT, MEMORY_BYTES, names, prompt_of

NODE = NodeId("pool")


@pytest.fixture
def store() -> Iterator[Store]:
    made = _store()
    yield made
    made.close()


def _store(memory_bytes: int = MEMORY_BYTES, ssd: Path | None = None) -> Store:
    options = StoreOptions(memory_bytes=memory_bytes, ssd=ssd, ssd_bytes=MEMORY_BYTES)
    return Store(NODE, options, EventLog("instance"))


def test_each_form_has_a_storage_of_its_own(store: Store) -> None:
    canonical, native = store.register(register("canonical")), store.register(register("native"))
    assert store.register(register("native", "another")) is native
    assert store.register(register("canonical", "another")) is canonical
    assert store.storages == (canonical, native) and store.first is canonical
    assert (canonical.name, native.name) == (NODE, f"{NODE}/native")
    assert canonical.spec == SPECS["canonical"] and native.spec == SPECS["native"]
    assert canonical.arena.page_bytes != native.arena.page_bytes
    for compat, storage in ((COMPAT, canonical), (NATIVE, native), (None, canonical)):
        assert store.storage_of(compat) is storage


def test_the_form_that_was_registered_first_stays_the_first(store: Store) -> None:
    """Gateways take it for the node's format, which never changes while the kvd runs."""
    native = store.register(register("native"))
    canonical = store.register(register("canonical"))
    assert store.first is native and store.storages == (native, canonical)
    assert (native.name, canonical.name) == (NODE, f"{NODE}/canonical"), "names never change"


@pytest.mark.parametrize(("first", "second"), [FORMS, FORMS[::-1]])
@pytest.mark.parametrize("field", ["model", "revision"])
def test_a_form_of_another_model_is_refused(
    store: Store, first: Form, second: Form, field: str
) -> None:
    before = store.register(register(first))
    capacity = _capacity(before)
    other = msgspec.structs.replace(COMPATS[second], **{field: "other"})
    with pytest.raises(InputError, match=f"{second} form of another model.*{field}: '.*'other'"):
        store.register(register(second, compat=other))
    assert store.storages == (before,) and _capacity(before) == capacity
    store.register(register(second))


@pytest.mark.parametrize(
    ("form", "more"),
    [
        ("native", {"layout": "vllm-HND"}),
        ("native", {"kv_dtype": "fp8"}),
        ("native", {"tensor_parallel": 1}),
        ("canonical", {"kv_dtype": "fp8"}),
    ],
)
def test_a_third_format_is_refused(store: Store, form: Form, more: dict[str, object]) -> None:
    for one in FORMS:
        store.register(register(one))
    compat = msgspec.structs.replace(COMPATS[form], **more)
    (field,) = more
    with pytest.raises(InputError, match=f"does not match this kvd: {field}: ") as refused:
        store.register(register(form, compat=compat))
    others = {name for name in compat.__struct_fields__ if f"{name}: " in str(refused.value)}
    assert others == {field}, "compared with the storage of its form"
    assert len(store.storages) == 2
    assert store.differences(compat) == COMPATS[form].differences(compat)


def test_differences_of_a_form_that_is_not_here_are_those_to_the_first(store: Store) -> None:
    assert store.differences(NATIVE) == ()
    store.register(register("canonical"))
    assert "layout: canonical here, vllm-NHD there" in store.differences(NATIVE)
    assert store.storage_of(NATIVE) is None


@pytest.mark.parametrize("name", ["pool", "pool/native", "pool/canonical"])
def test_an_engine_must_not_have_a_name_of_the_kvds_events(store: Store, name: str) -> None:
    """Also where that pool does not exist yet."""
    with pytest.raises(InputError, match="engine_id: .*is a name of this kvd"):
        store.register(register("canonical", name))
    assert store.storages == ()


def test_leases_of_two_forms_have_different_ids(store: Store) -> None:
    pools = [store.register(register(form)).pool for form in FORMS]
    ids = []
    for _ in range(3):
        for pool in pools:
            lease = pool.pin([], now=0.0)
            assert isinstance(lease, Lease)
            ids.append(lease.id)
    assert len({*ids}) == len(ids) and max(ids) < 1 << 53
    assert not pools[0].release(ids[1], 0.0), "a lease of the other pool"


# Memory ------------------------------------------------------------------------------------------


def _capacity(storage: Storage) -> int:
    capacity = storage.pool.occupancy().capacity_pages
    assert capacity is not None
    return capacity


def _fill_up(storage: Storage) -> None:
    """Reserves until nothing fits any more, and keeps it all as prefixes."""
    for seed in range(10_000):
        tokens = 40
        prompt = [seed * 1_000 + at for at in range(tokens)]
        lease = storage.pool.reserve(names(prompt), tokens, now=0.0)
        if isinstance(lease, NotNow):
            return
    raise AssertionError("the pool is never full")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("memory_bytes", [MEMORY_BYTES, 6_000, 1_001])
def test_a_single_form_has_all_the_memory(form: Form, memory_bytes: int) -> None:
    store = _store(memory_bytes)
    storage = store.register(register(form))
    pages = memory_bytes // storage.arena.page_bytes
    assert storage.arena.pages == _capacity(storage) == pages
    store.close()


@pytest.mark.parametrize(("greedy", "other"), [FORMS, FORMS[::-1]])
def test_a_form_is_guaranteed_an_eighth_of_the_memory(
    store: Store, greedy: Form, other: Form
) -> None:
    full, empty = store.register(register(greedy)), store.register(register(other))
    guarantee = MEMORY_BYTES // GUARANTEED_PARTS
    assert full.arena.pages == MEMORY_BYTES // full.arena.page_bytes, "an arena has the full size"
    _fill_up(full)
    page_bytes = full.arena.page_bytes
    assert _capacity(full) == (MEMORY_BYTES - guarantee) // page_bytes
    left = MEMORY_BYTES - full.pool.occupancy().used_pages * page_bytes
    assert _capacity(empty) == left // empty.arena.page_bytes
    _fill_up(empty)
    used = [one.pool.occupancy().used_pages * one.arena.page_bytes for one in store.storages]
    assert sum(used) <= MEMORY_BYTES and min(used) > guarantee * 0.9
    for storage in store.storages:
        storage.pool.check()


def test_a_form_that_finds_too_little_memory_is_refused(store: Store) -> None:
    first = store.register(register("canonical"))
    _fill_up(first)
    before = _capacity(first)
    with pytest.raises(InputError, match="--memory: the canonical form has taken.*native form"):
        store.register(register("native"))
    assert store.storages == (first,) and _capacity(first) == before
    assert store.register(register("canonical", "another")) is first, "its form goes on"


def test_a_form_whose_arena_cannot_be_made_gives_its_share_back(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = store.register(register("canonical"))
    before = _capacity(first)

    def fail(nbytes: int) -> int:
        raise InputError("no arena")

    monkeypatch.setattr("prfaas.kvd.store._memory", fail)
    for _ in range(10):
        with pytest.raises(InputError, match="no arena"):
            store.register(register("native"))
    monkeypatch.undo()
    assert _capacity(first) == before
    store.register(register("native"))
    assert _capacity(first) < before


def test_a_refusal_says_that_the_other_form_has_the_memory(store: Store) -> None:
    first, second = store.register(register("canonical")), store.register(register("native"))
    _fill_up(first)
    tokens = MEMORY_BYTES // 120 // 2  # half of the memory
    asked = second.pool.reserve(names(prompt_of(tokens)), tokens, now=0.0)
    assert isinstance(asked, NotNow) and "another form shares its memory" in asked.reason
    tokens *= 4
    asked = second.pool.reserve(names(prompt_of(tokens)), tokens, now=0.0)
    assert isinstance(asked, NotNow) and asked.reason.endswith("are more than the pool has")


async def test_the_ssd_tier_belongs_to_the_form_that_came_first(tmp_path: Path) -> None:
    store = _store(48_000, tmp_path)
    first, second = store.register(register("canonical")), store.register(register("native"))
    assert store.needs_preparation(first) and not store.needs_preparation(second)
    for storage in (first, second):
        for seed in range(30):
            hashes = names(prompt_of(40, seed))
            async with asyncio.timeout(20), store.prepared(storage, hashes, 40):
                lease = storage.pool.reserve(hashes, 40, now=0.0)
            assert isinstance(lease, Lease), lease
            storage.pool.commit(lease.id, 0.0)
            storage.pool.release(lease.id, 0.0)
        storage.pool.check()
    assert first.pool.stats.spilled_blocks > 0
    assert second.pool.stats.spilled_blocks == 0 < second.pool.stats.evicted_blocks
    store.close()


async def test_changes_of_both_pools_are_published_under_their_names(store: Store) -> None:
    prompt = prompt_of(8)
    for form in FORMS:
        pool = store.register(register(form)).pool
        lease = pool.reserve(names(prompt), 8, now=0.0)
        assert isinstance(lease, Lease)
        pool.commit(lease.id, 0.0)
    store.publish_changes()
    for storage, groups in zip(store.storages, ({"full0", "full1"}, {"kv"}), strict=True):
        events = store.events.page(storage.name, 0, None).events
        assert {event.node for event in events} == {storage.name}
        assert groups <= {event.group for event in events} <= {g.name for g in storage.spec.groups}
        assert [event.seq for event in events] == list(range(len(events)))


def test_a_registration_without_groups_is_refused_for_a_second_form(store: Store) -> None:
    store.register(register("canonical"))
    with pytest.raises(InputError, match="groups"):
        store.register(Register("engine", (), 4, NATIVE))
    store.register(register("native"))
