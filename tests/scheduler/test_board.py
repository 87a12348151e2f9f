import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
        subject.record_dispatch(way(), 5e8, 10.0)
        if end == "landed":
            subject.record_handoff(way())
            assert subject.view(0.0, {}, {}).links[OUT].pending_bytes == 0
            assert seen(subject, REMOTE[0]).queued == 0
            assert seen(subject, LOCAL[2]).active == 1, "it decodes now"
            subject.record_end(way(), 5e8)
        else:
            subject.record_failure(way(), 5e8)
        subject.forget_work(REMOTE[0])
        assert books(subject) == start


def test_copies_delay_the_start() -> None:
    subject = board()
    copy = CacheCopy(LOCAL[1], LOCAL[0], 64, 1000, 3.0)
    subject.record_dispatch(way(LOCAL[0], 2.0, (copy,)), 0.0, 10.0)
    assert seen(subject, LOCAL[0]).free_at_s == 15.0


def test_a_report_corrects_what_it_includes() -> None:
    subject = board()
    subject.record_dispatch(way(seconds=2.0), 0.0, 10.0)
    subject.record_dispatch(way(seconds=3.0), 0.0, 12.5)
    # Sent at 12, before the second dispatch: the first takes longer than expected.
    subject.record_report(REMOTE[0], NodeReport(12.0, 4.0, 0))
    assert seen(subject, REMOTE[0]).free_at_s == 19.0
    subject.record_report(REMOTE[0], NodeReport(13.0, 1.0, 0))
    assert seen(subject, REMOTE[0]).free_at_s == 14.0, "all of it is in that report"


def test_requests_of_other_routers_count_too() -> None:
    subject = board()
    subject.record_dispatch(way(), 0.0, 10.0)
    subject.record_report(LOCAL[2], NodeReport(11.0, 0.0, 3))
    assert seen(subject, LOCAL[2]).active == 4, "three there, one of ours on its way"
    subject.record_handoff(way())
    subject.record_report(LOCAL[2], NodeReport(12.0, 0.0, 4))
    assert seen(subject, LOCAL[2]).active == 4
    subject.record_report(LOCAL[2], NodeReport(13.0, 0.0, 1))
    assert seen(subject, LOCAL[2]).active == 1


@given(
    st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.1, 4.0)), min_size=1, max_size=12),
    st.integers(0, 11),
    st.floats(0, 1),
)
def test_a_true_report_changes_nothing(
    gaps: list[tuple[float, float]], after: int, lag: float
) -> None:
    """Predictions that hold are confirmed by any report, however late it comes."""
    subject = board()
    now, free, work_at = 0.0, 0.0, (0.0, 0.0)
    for place, (gap, seconds) in enumerate(gaps):
        now += gap
        free = max(free, now) + seconds
        subject.record_dispatch(way(seconds=seconds), 0.0, now)
        if place == min(after, len(gaps) - 1):
            at = now + lag * 0.05
            work_at = (at, max(0.0, free - at))
    subject.record_report(REMOTE[0], NodeReport(work_at[0], work_at[1], 0))
    assert seen(subject, REMOTE[0]).free_at_s == pytest.approx(free)


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
    subject.record_dispatch(way(LOCAL[0]), 5e8, 10.0)
    assert not subject.leave(LOCAL[0]), "it still has a prefill of ours"
    assert not subject.leave(LOCAL[2]), "it is to decode it"
    subject.record_handoff(way(LOCAL[0]))
    assert subject.leave(LOCAL[0]) and LOCAL[0] not in subject
    assert [node.node for node in subject.view(0.0, {}, {}).local.nodes] == [*LOCAL[1:], new]
    subject.record_end(way(LOCAL[0]), 5e8)
    subject.assign(new, "decode", usable=False)
    assert subject.node(new).role == "decode" and not subject.node(new).usable
    assert seen(subject, LOCAL[2]) == before, "places have shifted, accounts have not"
    assert subject.own_requests(LOCAL[2]).decoding == 0


def test_work_of_other_routers_does_not_keep_a_node() -> None:
    subject = board()
    subject.record_report(LOCAL[2], NodeReport(1.0, 0.0, 3))
    assert subject.node(LOCAL[2]).active == 3 and subject.leave(LOCAL[2])


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
