"""What a start does about garbage collection."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from prfaas.engine.start_phases import freeze_objects, without_collection


@pytest.fixture
def unfrozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_imports_run_without_collections_and_those_come_back() -> None:
    assert gc.isenabled()
    with pytest.raises(ImportError), without_collection():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled(), "the caller had switched them off"
    finally:
        gc.enable()


@pytest.mark.usefixtures("unfrozen")
def test_what_exists_is_not_visited_again() -> None:
    kept = [{} for _ in range(1_000)]  # type: list[dict[int, int]]
    freeze_objects()
    assert gc.get_freeze_count() > len(kept)
    assert len(gc.get_objects()) < len(kept)
