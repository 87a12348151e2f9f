from hypothesis import given
from hypothesis import strategies as st

from prfaas.scheduler.waiting import MAX_REFUSALS, HeldWork, Hold, WaitingRoom, length_class
from prfaas.types import ClusterId

CLUSTERS = [ClusterId("far"), ClusterId("near"), None]
holds = st.builds(
    Hold, st.just("test"), st.sampled_from(CLUSTERS), st.floats(0.01, 30), st.floats(0, 100)
)


@given(st.lists(holds, max_size=20), st.lists(st.sampled_from(CLUSTERS), max_size=20))
def test_each_queue_keeps_its_order_and_all_work_is_counted(
    given_holds: list[Hold], asked: list[ClusterId | None]
) -> None:
    room: WaitingRoom[int] = WaitingRoom()
    left = dict(enumerate(given_holds))
    for item, hold in left.items():
        room.put(item, hold)
    for cluster in asked:
        item = room.take(cluster)
        waiting = {k: h.precedence for k, h in left.items() if h.cluster == cluster}
        assert (item is None) == (not waiting)
        if item is not None:
            assert waiting[item] == min(waiting.values())
            del left[item]
        assert len(room) == len(left)
        assert set(room.queues()) == {hold.cluster for hold in left.values()}
        for waited, work in room.work.items():
            held = sum(hold.work_s for hold in left.values() if hold.cluster == waited)
            assert abs(work.total_s - held) < 1e-6
            first = min(hold.precedence for hold in left.values() if hold.cluster == waited)
            assert work.first == first


def test_the_first_of_equals_goes_first() -> None:
    room: WaitingRoom[str] = WaitingRoom()
    for item in "abc":
        room.put(item, Hold("test", None, 1.0, 5.0))
    assert [room.take(None) for _ in range(4)] == ["a", "b", "c", None]


@given(st.floats(0.001, 100), st.floats(0.001, 100))
def test_longer_prefills_do_not_count_for_shorter_ones(one: float, other: float) -> None:
    held = HeldWork().add(length_class(one), one)
    counts = length_class(one) <= length_class(other)
    assert held.up_to(other) == (one if counts else 0.0)
    assert counts or one > other


def test_an_item_can_be_removed_from_the_middle() -> None:
    room: WaitingRoom[str] = WaitingRoom()
    cluster = ClusterId("far")
    for item, precedence in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        room.put(item, Hold("test", cluster, 1.0, precedence))
    assert room.remove("b") and not room.remove("b")
    assert (len(room), room.work[cluster].total_s, room.work[cluster].first) == (2, 2.0, 2.0)
    assert [room.take(cluster) for _ in range(3)] == ["c", "a", None]
    room.put("d", Hold("test", cluster, 1.0, 0.0))
    assert room.remove("d") and not room.work and not list(room.queues())


def waiting_room(**precedences: float) -> WaitingRoom[str]:
    room: WaitingRoom[str] = WaitingRoom()
    for item, precedence in precedences.items():
        room.put(item, Hold("test", CLUSTERS[0], 1.0, precedence))
    return room


def test_retry_dispatches_in_order_while_there_is_room() -> None:
    room, placed = waiting_room(a=2.0, b=1.0, c=3.0), list[str]()
    room.retry(lambda item: None, lambda cluster: len(placed) < 2, placed.append)
    assert placed == ["b", "a"]
    assert room.take(CLUSTERS[0]) == "c"


def test_retry_stops_after_a_few_refusals_and_keeps_every_item() -> None:
    room = waiting_room(**{f"r{index}": float(index) for index in range(MAX_REFUSALS + 2)})
    tried = []

    def refuse(item: str) -> Hold:
        tried.append(item)
        return Hold("test", CLUSTERS[1], 1.0, 0.0)  # each waits for another cluster from now on

    room.retry(refuse, lambda cluster: True)
    assert tried == [f"r{index}" for index in range(MAX_REFUSALS)]
    assert (room.count(CLUSTERS[0]), room.count(CLUSTERS[1])) == (2, MAX_REFUSALS)


def test_items_without_a_cluster_are_retried_without_room() -> None:
    room: WaitingRoom[str] = WaitingRoom()
    room.put("a", Hold("test", None, 0.0, 0.0))
    room.retry(lambda item: None, lambda cluster: False)
    assert not len(room)
