from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from prfaas.cache.hashing import block_hashes
from prfaas.kvd.events import KEPT_EVENTS, KEPT_HASHES, EventLog
from prfaas.types import HashEvent, NodeId

NODE = NodeId("n")


def event(seq: int, hashes: int = 1) -> HashEvent:
    return HashEvent(seq, NODE, "full0", 4, (b"h",) * hashes, "stored")


def test_a_request_for_old_events_gets_a_snapshot() -> None:
    log = EventLog("now")
    log.add(NODE, [event(seq) for seq in range(KEPT_EVENTS + 5)])
    assert len(log.page(NODE, 5, {}).events) == KEPT_EVENTS
    asked = log.page(NODE, 4, {"full0": []})
    assert (asked.events, asked.snapshot, asked.next_seq) == ((), {"full0": ()}, KEPT_EVENTS + 5)


def test_kept_events_are_bounded_in_hashes() -> None:
    """A long prompt's event has thousands."""
    log = EventLog("now")
    each = KEPT_HASHES // 8
    for seq in range(20):
        log.add(NODE, [event(seq, each)])
    assert [one.seq for one in log.page(NODE, 12, {}).events] == list(range(12, 20))
    assert log.page(NODE, 11, {}).snapshot == {}
    log.add(NODE, [event(20, KEPT_HASHES + 1)])  # more than is ever kept
    assert log.page(NODE, 20, {}).snapshot == {}
    assert log.page(NODE, 21, {}).snapshot is None


def test_an_unreadable_payload_is_a_gap_that_a_replay_cannot_hide() -> None:
    log = EventLog("now")
    log.publish(NODE, b"\xc1", {0: "full0"})
    assert log.nodes == {NODE: 1}
    assert log.page(NODE, 0, None).snapshot == {"full0": ()}


def test_an_unknown_node_has_no_events() -> None:
    assert EventLog("now").page(NODE, 0, None).events == ()


def stored(engine_hash: int) -> bytes:
    """A payload in vLLM's format."""
    event = {
        "type": "BlockStored",
        "block_hashes": [engine_hash],
        "parent_block_hash": None,
        "token_ids": [engine_hash],
        "block_size": 1,
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


@pytest.mark.parametrize("since", [0, 9_999_998, -(10**7)])
def test_a_page_takes_no_memory_for_events_that_are_not_kept(since: int) -> None:
    log = EventLog("now")
    log.add(NODE, [event(9_999_999)])
    tracemalloc.start()
    try:
        page = log.page(NODE, since, {"full0": []})
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert page.snapshot == {"full0": ()}
    assert peak < 1 << 20


def test_engines_that_have_exited_are_forgotten_in_time() -> None:
    log = EventLog("now")
    for number in range(1_000):
        node = NodeId(f"engine-{number}")
        log.publish(node, stored(number), {0: "full0"})
        log.forget_engine(node)
    assert len(log.nodes) < 500
    last = log.page(node, log.next_seq(node) - 1, None).events
    assert [one.action for one in last] == ["removed"]


def test_a_reader_of_a_forgotten_engine_gets_a_snapshot_when_it_returns() -> None:
    log = EventLog("now")
    first = NodeId("engine-0")
    log.publish(first, stored(1), {0: "full0"})
    log.forget_engine(first)
    since = log.nodes[first]
    for number in range(1, 1_000):
        node = NodeId(f"engine-{number}")
        log.publish(node, stored(number), {0: "full0"})
        log.forget_engine(node)
    for number in range(2 * since):
        log.publish(first, stored(number), {0: "full0"})
    page = log.page(first, since, None)
    assert page.snapshot is not None and len(page.snapshot["full0"]) == 2 * since


def stored_blocks(tokens: list[int], size: int, group: int = 0) -> bytes:
    event = {
        "type": "BlockStored",
        "block_hashes": [
            b"engine" + bytes(tokens[:end]) for end in range(size, len(tokens) + 1, size)
        ],
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": size,
        "group_idx": group,
    }
    return msgspec.msgpack.encode([0.0, [event], 0])


def test_an_engine_is_announced_in_the_blocks_it_asks_for() -> None:
    tokens = list(range(24))
    names = {0: "full0", 1: "linear0", 2: "linear0"}
    log = EventLog("now")
    for group in names:
        log.publish(NODE, stored_blocks(tokens, 6, group), names, 4, {"linear0"})
    held = tuple(block_hashes(tokens, 4))
    events = log.page(NODE, 0, None).events
    assert [(e.seq, e.group, e.block_tokens, e.hashes) for e in events] == [
        (0, "full0", 4, held),
        (1, "linear0", 4, (held[2], held[5])),
    ]
    snapshot = log.page(NODE, -1, None).snapshot
    assert snapshot == {"full0": held, "linear0": (held[2], held[5])}


def test_another_block_size_begins_anew() -> None:
    """Blocks of the first size are removed, and the numbers go on without a gap."""
    tokens = list(range(24))
    log = EventLog("now")
    log.publish(NODE, stored_blocks(tokens, 6), {0: "full0"}, 4)
    log.publish(NODE, stored_blocks(tokens, 6), {0: "full0"}, 8)
    events = log.page(NODE, 0, None).events
    assert [(e.seq, e.action, e.block_tokens, len(e.hashes)) for e in events] == [
        (0, "stored", 4, 6),
        (1, "removed", 4, 6),
        (2, "stored", 8, 3),
    ]
    log.publish(NODE, b"\xc1", {0: "full0"}, 8)
    assert log.page(NODE, 3, None).snapshot == {"full0": tuple(block_hashes(tokens, 8))}
