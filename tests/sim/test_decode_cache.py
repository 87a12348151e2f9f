import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.groups import rules_for, unit_bytes
from prfaas.cache.journal import Journal
from prfaas.kvspec import FullAttention, KVSpec, LinearState, SlidingWindow
from prfaas.sim.decode_cache import DecodeCache
from prfaas.types import BlockHash, NodeId

SPEC = KVSpec(
    (
        FullAttention("full0", (0,), 10),
        SlidingWindow("window0", (1,), 10, 100),
        LinearState("linear0", (2,), 500),
    )
)
NAMES = tuple(BlockHash(bytes([k])) for k in range(8))


def decode_cache(capacity_bytes: float = 1e9) -> tuple[DecodeCache, Journal]:
    journal = Journal()
    return DecodeCache(rules_for(SPEC), unit_bytes(SPEC, 64), 64, capacity_bytes, journal), journal


def test_attention_without_states_saves_bytes_but_cannot_resume() -> None:
    subject, _ = decode_cache()
    subject.put(NAMES[:3], states=False)
    assert subject.attention_tokens(NAMES) == 3 * 64
    assert not subject.can_resume(NAMES[:3])


def test_with_its_states_a_prefix_resumes_at_its_end_only() -> None:
    subject, _ = decode_cache()
    subject.put(NAMES[:3], states=True)
    assert subject.can_resume(NAMES[:3])
    assert not subject.can_resume(NAMES[:2]) and not subject.can_resume(NAMES[:4])


def test_a_remainder_follows_the_longest_prefix_with_states() -> None:
    subject, _ = decode_cache()
    assert subject.resumable_tokens(NAMES) == 0
    subject.put(NAMES[:2], states=True)
    subject.put(NAMES[:5], states=False)
    assert subject.resumable_tokens(NAMES) == 2 * 64
    subject.put(NAMES[:4], states=True)
    assert subject.resumable_tokens(NAMES) == 4 * 64
    assert subject.resumable_tokens(NAMES[:3]) == 2 * 64


def test_the_oldest_run_is_evicted_first_from_its_end() -> None:
    subject, _ = decode_cache(capacity_bytes=4 * 640)
    subject.put(NAMES[:3], states=False)
    subject.put(NAMES[5:7], states=False)
    assert subject.attention_tokens(NAMES) == 2 * 64
    assert subject.attention_tokens(NAMES[5:]) == 2 * 64


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(1, 8), st.booleans()), max_size=12),
    st.sampled_from([0.0, 2000.0, 5000.0, 1e9]),
)
def test_events_match_the_contents(
    handed: list[tuple[int, int, bool]], capacity_bytes: float
) -> None:
    subject, journal = decode_cache(capacity_bytes)
    reported: set[tuple[str, bytes]] = set()
    for first, length, states in handed:
        subject.put(NAMES[first : first + length], states=states)
        subject.check()
        for event in journal.take(NodeId("a"), 64, 0):
            for name in event.hashes:
                key = (event.group, name)
                assert (key in reported) == (event.action == "removed")
                reported.add(key) if event.action == "stored" else reported.discard(key)
    run = next((k for k, name in enumerate(NAMES) if ("full0", name) not in reported), len(NAMES))
    assert subject.attention_tokens(NAMES) == run * 64


@pytest.mark.parametrize("blocks", [1, 2, 5])
def test_an_empty_cache_holds_nothing(blocks: int) -> None:
    subject, _ = decode_cache()
    assert subject.attention_tokens(NAMES[:blocks]) == 0
