from math import inf

from hypothesis import given
from hypothesis import strategies as st

from prfaas.sim.events import Events


@given(st.lists(st.sampled_from([0.0, 1.0, 1.5, 2.0, 7.0])))
def test_events_run_in_order_of_time_then_of_scheduling(times: list[float]) -> None:
    events, seen = Events(), []
    for place, when in enumerate(times):
        events.at(when, lambda what: seen.append((events.now_s, what)), place)
    events.run_before(inf)
    assert seen == sorted((when, place) for place, when in enumerate(times))
    assert not events


def test_an_event_due_at_the_end_of_the_period_waits() -> None:
    events, seen = Events(), []
    for when in (1.0, 2.0, 3.0):
        events.at(when, seen.append, when)
    events.run_before(2.0)
    assert seen == [1.0] and events.now_s == 2.0 and events
