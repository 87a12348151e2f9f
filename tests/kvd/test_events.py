from __future__ import annotations

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
