import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.contracts.slot_shares import kept_free
from prfaas.scheduler.board import Board, NodeReport
from prfaas.scheduler.request import CacheCopy, Route
from prfaas.scheduler.view import LinkView, NodeView, exclude_nodes
from prfaas.types import LinkStats, NodeId
from tests.scheduler.views import BACK, COSTS, FAR, LOCAL, NEAR, OUT, REMOTE, books


def board() -> Board:
    link = LinkView(True, 1e8, 0.01, None, 0.0)
    subject = Board(
        COSTS, [(NEAR, LOCAL), (FAR, REMOTE)], {OUT: link, BACK: link}, slots=4, kv_bytes=1e9
    )
    for name in LOCAL[2:]:
        subject.assign(name, "decode", usable=True)
    return subject


def way(prefill: NodeId = REMOTE[0], seconds: float = 2.0, copies: tuple = ()) -> Route:
    cluster = FAR if prefill in REMOTE else NEAR
    return Route(
        cluster, prefill, NEAR, LOCAL[2], cluster == FAR, 0, 100, 1000, seconds, copies, "test"
    )


def seen(subject: Board, name: NodeId, now_s: float = 0.0) -> NodeView:
    view = subject.view(now_s, {}, {})
    return next(n for c in (view.local, *view.remotes) for n in c.nodes if n.node == name)


def test_dispatches_count_at_once() -> None:
    subject = board()
    links, nodes = subject.view(10.0, {}, {}).links, subject.view(10.0, {}, {}).remotes[0].nodes
    for _ in range(2):
        subject.record_dispatch(way(), 5e8, 10.0)
    assert seen(subject, REMOTE[0]).free_at_s == 14.0
    assert seen(subject, REMOTE[0]).queued == 2
    assert seen(subject, LOCAL[2]).active == 2
    assert seen(subject, LOCAL[2]).free_kv_bytes == 0
    assert subject.view(10.0, {}, {}).links[OUT].pending_bytes == 2000
    assert links[OUT].pending_bytes == 0 and nodes[0].queued == 0, "these are snapshots"


def test_a_request_leaves_the_board_in_steps() -> None:
    subject = board()
    start = books(subject)
    for end in ("landed", "given up"):
        job = subject.record_dispatch(way(), 5e8, 10.0)
        if end == "landed":
            assert subject.record_prefilled(job, 11.0) and not subject.record_prefilled(job, 11.5)
            assert seen(subject, REMOTE[0]).queued == 0
            subject.record_handoff(job, 12.0)
            assert subject.view(0.0, {}, {}).links[OUT].pending_bytes == 0
            assert seen(subject, LOCAL[2]).active == 1, "it decodes now"
            subject.record_end(job)
        else:
            subject.record_failure(job, 12.0)
        assert subject.own_prefills(REMOTE[0], 12.0) == (0, 0.0)
        subject.forget_work(REMOTE[0])
        assert books(subject) == start


def test_copies_delay_the_start() -> None:
    subject = board()
    copy = CacheCopy(LOCAL[1], LOCAL[0], 64, 1000, 3.0)
    subject.record_dispatch(way(LOCAL[0], 2.0, (copy,)), 0.0, 10.0)
    assert seen(subject, LOCAL[0]).free_at_s == 15.0


def test_a_prefill_that_was_seen_to_end_is_free_at_once() -> None:
    """Whatever was predicted, and before any report."""
    subject = board()
    jobs = [subject.record_dispatch(way(seconds=s), 0.0, at) for at, s in ((1, 2.0), (2, 3.0))]
    assert seen(subject, REMOTE[0]).free_at_s == 6.0
    subject.record_prefilled(jobs[0], 2.0)
    assert seen(subject, REMOTE[0]).free_at_s == 5.0, "the second has begun"
    subject.record_report(REMOTE[0], NodeReport(2.5, 4.0, 0))
    assert seen(subject, REMOTE[0]).free_at_s == 9.0, "others have work there"
    subject.record_prefilled(jobs[1], 4.0)
    assert seen(subject, REMOTE[0]).free_at_s == 6.5
    subject.record_report(REMOTE[0], NodeReport(5.0, 0.0, 0))
    assert seen(subject, REMOTE[0]).free_at_s == 5.0, "the others have none any more"


def test_an_idle_node_stays_idle_since_when_it_was() -> None:
    """So idle nodes take turns, whichever of them has reported last."""
    subject = board()
    for name, at_s in ((REMOTE[0], 1.0), (REMOTE[1], 2.0)):
        job = subject.record_dispatch(way(name, 3.0), 0.0, at_s)
        subject.record_prefilled(job, at_s + 0.5)
    subject.record_report(REMOTE[0], NodeReport(9.0, 0.0, 0))
    assert [seen(subject, name).free_at_s for name in REMOTE] == [1.5, 2.5]


def test_an_overdue_prefill_needs_as_much_time_again() -> None:
    subject = board()
    job = subject.record_dispatch(way(seconds=2.0), 0.0, 0.0)
    subject.record_dispatch(way(seconds=1.0), 0.0, 0.0)
    subject.record_report(REMOTE[0], NodeReport(7.0, 0.0, 0))
    assert seen(subject, REMOTE[0]).free_at_s == 7.0 + 5.0 + 1.0
    assert subject.own_prefills(REMOTE[0], 7.0) == (2, 6.0)
    subject.record_prefilled(job, 8.0)
    assert seen(subject, REMOTE[0]).free_at_s == 9.0


def test_a_prefill_that_cannot_begin_keeps_no_other_waiting() -> None:
    """Nothing says when it can, so it is not taken to be overdue."""
    subject = board()
    unready = subject.record_dispatch(way(seconds=2.0), 0.0, 0.0)
    subject.record_unready(unready, 0.5)
    subject.record_report(REMOTE[0], NodeReport(7.0, 0.0, 0))
    assert seen(subject, REMOTE[0]).free_at_s == 0.5 and seen(subject, REMOTE[0]).queued == 1
    assert not subject.leave(REMOTE[0]), "the request depends on it"
    other = subject.record_dispatch(way(seconds=3.0), 0.0, 7.0)
    assert seen(subject, REMOTE[0]).free_at_s == 10.0
    subject.record_ready(unready, 8.0)
    assert seen(subject, REMOTE[0]).free_at_s == 12.0, "it is the last one now"
    subject.record_prefilled(other, 10.0)
    assert seen(subject, REMOTE[0]).free_at_s == 12.0
    subject.record_prefilled(unready, 11.0)
    assert seen(subject, REMOTE[0]).free_at_s == 11.0 and seen(subject, REMOTE[0]).queued == 0


def test_an_answer_that_does_not_stream_does_not_keep_its_node_busy() -> None:
    """A node that serves a request alone shows the end of the prefill with the first token, and
    that comes with the last one."""
    subject = board()
    own = Route(NEAR, LOCAL[2], NEAR, LOCAL[2], False, 0, 0, 0, 2.0, (), "alone")
    jobs = [subject.record_dispatch(own, 0.0, 0.0, streams=False) for _ in range(3)]
    for at_s, free_at_s in ((3.0, 6.0), (7.0, 6.0)):
        subject.record_report(LOCAL[2], NodeReport(at_s, 0.0, 3))
        assert seen(subject, LOCAL[2]).free_at_s == free_at_s
    assert subject.own_prefills(LOCAL[2], 7.0) == (3, 0.0)
    subject.record_handoff(jobs[1], 8.0)
    later = subject.record_dispatch(own, 0.0, 9.0, streams=True)
    assert seen(subject, LOCAL[2]).free_at_s == 11.0
    subject.record_handoff(later, 10.0)
    assert seen(subject, LOCAL[2]).free_at_s == 10.0, "this one has streamed"


def test_a_slow_node_that_serves_alone_is_busy_until_its_first_token() -> None:
    subject = board()
    own = Route(NEAR, LOCAL[2], NEAR, LOCAL[2], False, 0, 0, 0, 2.0, (), "alone")
    job = subject.record_dispatch(own, 0.0, 0.0)
    subject.record_report(LOCAL[2], NodeReport(30.0, 0.0, 1))
    assert seen(subject, LOCAL[2]).free_at_s == 58.0
    subject.record_handoff(job, 31.0)
    assert seen(subject, LOCAL[2]).free_at_s == 31.0


def test_requests_of_other_routers_count_too() -> None:
    subject = board()
    job = subject.record_dispatch(way(), 0.0, 10.0)
    subject.record_report(LOCAL[2], NodeReport(11.0, 0.0, 3))
    assert seen(subject, LOCAL[2]).active == 4, "three there, one of ours on its way"
    subject.record_handoff(job, 11.5)
    subject.record_report(LOCAL[2], NodeReport(12.0, 0.0, 4))
    assert seen(subject, LOCAL[2]).active == 4
    subject.record_report(LOCAL[2], NodeReport(13.0, 0.0, 1))
    assert seen(subject, LOCAL[2]).active == 1


@given(
    st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 4.0)), min_size=1, max_size=12),
    st.floats(0, 30),
)
def test_predictions_that_hold_are_confirmed(gaps: list[tuple[float, float]], at_s: float) -> None:
    """By a report at any time, and by the ends of the prefills before it."""
    subject = board()
    now, free, ends = 0.0, 0.0, []
    for gap, seconds in gaps:
        now += gap
        free = max(free, now) + seconds
        for job, end_s in ends:
            if end_s <= now:
                subject.record_prefilled(job, end_s)
        ends = [(job, end_s) for job, end_s in ends if end_s > now]
        ends.append((subject.record_dispatch(way(seconds=seconds), 0.0, now), free))
    assert seen(subject, REMOTE[0]).free_at_s == pytest.approx(free)
    if now <= at_s < ends[0][1]:
        subject.record_report(REMOTE[0], NodeReport(at_s, 0.0, 0))
        assert seen(subject, REMOTE[0]).free_at_s == pytest.approx(free)
    for place, (job, end_s) in enumerate(ends):
        left_s = free - end_s
        assert subject.record_prefilled(job, end_s)
        assert subject.own_prefills(REMOTE[0], end_s) == (
            len(ends) - place - 1,
            pytest.approx(left_s),
        )


def test_a_link_without_connections_is_down() -> None:
    subject = board()
    assert (link := subject.link(OUT)) is not None and link.up
    subject.record_link_report(OUT, LinkStats("near", 1.0, 0, 0.0, 0, 0))
    assert (link := subject.link(OUT)) is not None and not link.up
    assert not subject.view(1.0, {}, {}).links[OUT].up


def test_nodes_join_and_leave() -> None:
    subject = board()
    new = NodeId("new")
    subject.join(NEAR, new)
    assert seen(subject, new) == NodeView(new, "prefill", True, -math.inf, 0, 0, 4, 1e9)
    before = seen(subject, LOCAL[2])
    job = subject.record_dispatch(way(LOCAL[0]), 5e8, 10.0)
    assert not subject.leave(LOCAL[0]), "it still has a prefill of ours"
    assert not subject.leave(LOCAL[2]), "it is to decode it"
    subject.record_prefilled(job, 11.0)
    assert subject.leave(LOCAL[0]) and LOCAL[0] not in subject
    assert [node.node for node in subject.view(0.0, {}, {}).local.nodes] == [*LOCAL[1:], new]
    subject.record_handoff(job, 12.0)
    subject.record_end(job)
    subject.assign(new, "decode", usable=False)
    assert subject.node(new).role == "decode" and not subject.node(new).usable
    assert seen(subject, LOCAL[2]) == before, "places have shifted, accounts have not"
    assert subject.own_sequences(LOCAL[2]).decoding == 0


def test_work_of_other_routers_does_not_keep_a_node() -> None:
    subject = board()
    subject.record_report(LOCAL[2], NodeReport(1.0, 0.0, 3))
    assert subject.node(LOCAL[2]).active == 3 and subject.leave(LOCAL[2])


def test_sequences_of_other_routers_that_wait_for_a_slot_hold_none() -> None:
    subject, node = board(), LOCAL[2]
    slots = subject.node(node).slots
    subject.record_report(node, NodeReport(1.0, 0.0, 64, slots - 1))
    assert subject.node(node).active == 64
    assert subject.decoding(node) == ({}, slots - 1)
    # Of the sequences in the batch, as many are own ones as own ones may hold slots.
    job = subject.record_dispatch(way(LOCAL[0]), 0.0, 2.0, sequences=64, tenant="a")
    subject.record_handoff(job, 3.0)
    subject.record_report(node, NodeReport(4.0, 0.0, 128, slots))
    assert subject.decoding(node) == ({"a": 64}, kept_free(slots))
    subject.record_report(node, NodeReport(5.0, 0.0, 65))
    assert subject.decoding(node).others == 1, "where the batch is not known, all of them"


def test_a_view_with_excluded_nodes_is_the_same_otherwise() -> None:
    view = board().view(0.0, {}, {})
    assert exclude_nodes(view, ()) is view
    fewer = exclude_nodes(view, {LOCAL[1], REMOTE[0]})
    for before, after in zip(
        (view.local, *view.remotes), (fewer.local, *fewer.remotes), strict=True
    ):
        for one, other in zip(before.nodes, after.nodes, strict=True):
            gone = one.node in (LOCAL[1], REMOTE[0])
            assert other == one._replace(usable=not gone)
