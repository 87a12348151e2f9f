import pytest

from prfaas.planner.profile import DecodeRate, DecodeStep
from prfaas.scheduler.board import Dispatch
from prfaas.scheduler.request import Route
from prfaas.sim.attempt import Attempt
from prfaas.sim.events import Events
from prfaas.sim.nodes import Batch
from prfaas.types import ClusterId, NodeId

CONSTANT = DecodeRate(4, 0.1)
# Alone a step takes 0.1 s, in a batch of two 0.2 s.
SLOWING = DecodeRate(2, 0.2, (DecodeStep(1, 0.1), DecodeStep(2, 0.2)))


def attempt(index: int) -> Attempt:
    here = ClusterId("c")
    way = Route(here, NodeId("a"), here, NodeId("a"), False, 0, 1, 1, 1.0, (), "test")
    return Attempt(index, way, Dispatch(way, 0.0, 0.0))


def ends(rate: DecodeRate, starts: dict[float, int]) -> tuple[dict[int, float], list[float]]:
    """When each of the requests that begin at `starts` (output tokens) ends; first tokens."""
    events, ended, firsts = Events(), {}, []
    batch = Batch(events, rate, lambda j: ended.update({j.index: events.now_s}))
    for index, (at_s, tokens) in enumerate(starts.items()):

        def start(what: tuple[int, int]) -> None:
            firsts.append(batch.start(attempt(what[0]), what[1]))

        events.at(at_s, start, (index, tokens))
    events.run_before(float("inf"))
    assert batch.running == 0
    return ended, firsts


def test_constant_steps() -> None:
    ended, firsts = ends(CONSTANT, {0.0: 10, 0.5: 10})
    assert ended == pytest.approx({0: 1.0, 1: 1.5}) and firsts == pytest.approx([0.1, 0.6])


def test_a_fuller_batch_steps_more_slowly() -> None:
    ended, firsts = ends(SLOWING, {0.0: 10, 0.5: 10})
    # 5 tokens alone by 0.5 s; 5 more at half the speed by 1.5 s; the other then has 5 left, alone.
    assert ended == pytest.approx({0: 1.5, 1: 2.0}) and firsts == pytest.approx([0.1, 0.7])


@pytest.mark.parametrize(("rate", "alone_s"), [(CONSTANT, 1.0), (SLOWING, 1.0)])
def test_a_delay_moves_every_end(rate: DecodeRate, alone_s: float) -> None:
    events, ended = Events(), {}
    batch = Batch(events, rate, lambda j: ended.update({j.index: events.now_s}))
    assert batch.step_s() == 0.0
    batch.start(attempt(0), 10)
    assert batch.step_s() == pytest.approx(0.1)
    events.at(0.35, batch.delay, 0.5)
    events.at(0.6, batch.delay, 0.25)
    events.run_before(float("inf"))
    assert ended == pytest.approx({0: alone_s + 0.75}) and batch.running == 0
    batch.delay(3.0)  # no request runs
    batch.start(attempt(1), 10)
    events.run_before(float("inf"))
    assert ended[1] == pytest.approx(ended[0] + alone_s)


@pytest.mark.parametrize("rate", [CONSTANT, SLOWING])
def test_a_lost_node_ends_no_request(rate: DecodeRate) -> None:
    events, ended = Events(), []
    batch = Batch(events, rate, ended.append)
    lost = attempt(0)
    batch.start(lost, 10)
    lost.is_over = True
    batch.clear()
    batch.start(attempt(1), 20)
    events.run_before(float("inf"))
    assert [j.index for j in ended] == [1] and batch.running == 0
