from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prfaas.gateway.client.node_client import Load
from prfaas.gateway.fleet.prefill_work import OthersWork, PrefillWork


def test_the_first_job_has_run_since_the_one_before_ended() -> None:
    work = PrefillWork()
    work.add("a", 4.0, 10.0)
    work.add("b", 6.0, 11.0)
    assert work.left_s(12.0) == 2.0 + 6.0
    assert work.left_s(20.0) == 6.0, "it takes longer than expected, but is still the first"
    assert work.end("a", 20.0) and not work.end("a", 21.0)
    assert work.left_s(22.0) == 4.0
    assert work.end("b", 26.0)
    assert work.left_s(30.0) == 0.0


def test_requests_of_other_gateways_count_with_the_average() -> None:
    work = PrefillWork()
    work.add("a", 4.0, 10.0)
    report = work.node_report(Load(running=1, waiting=2), "prefill", 1, 0, 10.0)
    assert (report.work_s, report.decoding) == (4.0 + 2 * 4.0, 0)


def test_an_idle_node_has_the_work_that_was_just_sent() -> None:
    work = PrefillWork()
    assert work.node_report(Load(0, 0), "prefill", 0, 0, 10.0).work_s == 0.0
    work.add("a", 4.0, 10.0)
    assert work.node_report(Load(0, 0), "prefill", 1, 0, 10.0).work_s == 4.0


def test_requests_at_a_decode_node_are_decoded() -> None:
    report = PrefillWork().node_report(Load(running=5, waiting=1), "decode", 0, 2, 3.0)
    assert (report.at_s, report.work_s, report.decoding) == (3.0, 0.0, 6)


def test_a_decode_node_does_not_know_yet_of_requests_whose_kv_is_to_arrive() -> None:
    others = OthersWork(prefills=0, work_s=0.0, decodes=4)
    for running, expected in ((3, 2 + 4), (9, 9)):
        report = PrefillWork().node_report(Load(running, 0), "decode", 0, 2, 3.0, others)
        assert report.decoding == expected


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=20))
def test_work_is_never_negative(steps: list[tuple[float, float]]) -> None:
    work, now_s = PrefillWork(), 0.0
    for index, (later_s, work_s) in enumerate(steps):
        now_s += later_s
        work.add(index, work_s, now_s)
        if index % 3 == 2:
            work.end(index - 1, now_s)
        total = sum(w for _, w in steps[: index + 1])
        assert 0 <= work.left_s(now_s) <= total + 1e-9
