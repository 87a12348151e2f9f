from prfaas.sim.caches import Caches
from prfaas.sim.config import CacheConfig
from prfaas.sim.events import Events
from prfaas.types import BlockHash, ClusterId, NodeId
from tests.planner.builders import FAST, SPEC

A, B = NodeId("a"), NodeId("b")
NAMES = tuple(BlockHash(bytes([k])) for k in range(6))


def caches(
    bytes_per_node: float = float("inf"), *, keep_answers: bool = True
) -> tuple[Caches, Events]:
    events = Events()
    config = CacheConfig(
        bytes_per_node, block_tokens=64, checkpoints="last", keep_answers=keep_answers
    )
    nodes = [(node, ClusterId("c"), FAST) for node in (A, B)]
    return Caches(SPEC, config, nodes, events, event_lag_s=0.5), events


def prefilled(subject: Caches, node: NodeId, names: tuple[BlockHash, ...]) -> int:
    lease = subject.open(node, names)
    assert lease is not None
    subject.commit(node, lease)
    subject.release(node, lease)
    return lease.match.tokens


def test_cache_events_reach_the_router_late() -> None:
    subject, events = caches()
    prefilled(subject, A, NAMES)
    assert not subject.match(NAMES)
    events.run_before(1.0)
    (found,) = subject.match(NAMES).items()
    assert found[0] == A and found[1].tokens == 6 * 64
    assert prefilled(subject, A, NAMES) == 6 * 64
    subject.check()


def test_states_decide_where_a_prompt_resumes() -> None:
    subject, events = caches()
    prefilled(subject, A, NAMES)
    events.run_before(1.0)
    found = subject.match(NAMES[:4])[A]
    assert (found.tokens, found.attention_tokens) == (0, 4 * 64), "no state was kept there"


def test_a_copy_brings_the_state_with_it() -> None:
    subject, events = caches()
    prefilled(subject, A, NAMES)
    assert subject.holds(A, NAMES) and not subject.holds(A, NAMES[:4])
    subject.store_copy(B, NAMES)
    events.run_before(1.0)
    assert subject.match(NAMES)[B].tokens == 6 * 64


def test_a_lost_node_holds_nothing_and_sends_no_events() -> None:
    subject, events = caches()
    prefilled(subject, A, NAMES)
    subject.leave(A)
    subject.join(A)
    events.run_before(1.0)
    assert not subject.match(NAMES), "what it said before it died does not count"
    assert prefilled(subject, A, NAMES) == 0
    assert not subject.holds(NodeId("unknown"), NAMES)
    subject.check()


def test_a_prompt_that_does_not_fit_is_served_and_not_kept() -> None:
    subject, events = caches(bytes_per_node=200_000)
    assert subject.open(A, NAMES) is None
    assert prefilled(subject, A, NAMES[:2]) == 0
    assert prefilled(subject, A, (BlockHash(b"x"), BlockHash(b"y"))) == 0
    events.run_before(1.0)
    assert not subject.match(NAMES[:2]), "evicted, and the index has the event"
    assert subject.open(A, ()) is None


def test_the_next_turn_resumes_where_the_answer_ended() -> None:
    subject, events = caches()
    subject.store_handoff(A, NAMES[:4], 4 * 64 + 10)
    subject.store_answer(A, NAMES, 4 * 64 + 10)
    events.run_before(1.0)
    assert subject.match(NAMES)[A].tokens == 6 * 64 and subject.holds(A, NAMES)
    subject.check()


def test_an_answer_is_not_kept_without_its_prompt_or_against_the_configuration() -> None:
    subject, _ = caches()
    subject.store_answer(A, NAMES, 4 * 64 + 10)
    assert subject.held_tokens(A, NAMES) == 0
    subject, _ = caches(keep_answers=False)
    subject.store_handoff(A, NAMES[:4], 4 * 64 + 10)
    subject.store_answer(A, NAMES, 4 * 64 + 10)
    assert subject.held_tokens(A, NAMES) == 4 * 64
