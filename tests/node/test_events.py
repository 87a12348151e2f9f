from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from prfaas.cache.hashing import EngineHashes, block_hashes, hash_events
from prfaas.kvspec import FullAttention, KVSpec, LinearState, SlidingWindow
from prfaas.node.kv_events.translator import EventTranslator
from prfaas.types import BlockHash, HashEvent, NodeId

NODE = NodeId("n")
SPEC = KVSpec(
    (
        FullAttention("full0", (0,), 8),
        SlidingWindow("window0", (1,), 8, 4),
        LinearState("linear0", (2,), 16),
    )
)
BLOCK = 4
TOKENS = list(range(100, 120))


def names(tokens: list[int] = TOKENS, salt: str = "") -> list[BlockHash]:
    return block_hashes(tokens, BLOCK, salt=salt)


def stored(group: str, hashes: list[BlockHash], action: Any = "stored") -> HashEvent:
    return HashEvent(0, NODE, group, BLOCK, tuple(hashes), action)


class Reader:
    """A reader of vLLM's events, which recovers the block hashes."""

    def __init__(self) -> None:
        groups = {index: group.name for index, group in enumerate(SPEC.groups)}
        self.engine = EngineHashes(NODE, groups)

    def read(self, events: list[dict[str, Any]]) -> None:
        hash_events(self.engine, msgspec.msgpack.encode([0.0, events, 0]))
        assert not self.engine.malformed and not self.engine.unnamed
        self.engine.check()

    def holds(self) -> dict[str, set[BlockHash]]:
        return {group: set(held) for group, held in self.engine.holdings().items() if held}


def test_what_the_pool_stored_reaches_a_reader_of_vllms_events_under_our_names() -> None:
    translator, reader = EventTranslator(SPEC, BLOCK), Reader()
    hashes = names(salt="tenant")
    assert translator.learn(TOKENS, hashes, "tenant") == []
    reader.read(translator.translate(stored("full0", hashes)))
    reader.read(translator.translate(stored("window0", hashes[3:])))
    reader.read(translator.translate(stored("linear0", hashes[4:])))
    expected = {"full0": set(hashes), "window0": set(hashes[3:]), "linear0": set(hashes[4:])}
    assert reader.holds() == expected
    reader.read(translator.translate(stored("full0", hashes[2:], "removed")))
    assert reader.holds()["full0"] == set(hashes[:2])
    reader.read(translator.cleared())
    assert reader.holds() == {}


def test_what_a_transfer_brought_is_announced_with_the_prompt_that_continues_it() -> None:
    translator, reader = EventTranslator(SPEC, BLOCK), Reader()
    hashes = names()
    assert translator.translate(stored("full0", hashes[:3])) == []
    assert translator.translate(stored("linear0", hashes[2:3])) == []
    reader.read(translator.learn(TOKENS, hashes, ""))
    assert reader.holds() == {"full0": set(hashes[:3]), "linear0": {hashes[2]}}
    assert translator.learn(TOKENS, hashes, "") == []


def test_what_was_removed_before_it_had_a_name_is_never_announced() -> None:
    translator = EventTranslator(SPEC, BLOCK)
    hashes = names()
    translator.translate(stored("full0", hashes))
    assert translator.translate(stored("full0", hashes, "removed")) == []
    assert translator.learn(TOKENS, hashes, "") == []


def test_an_event_names_a_window_by_its_length() -> None:
    translator = EventTranslator(SPEC, BLOCK)
    hashes = names()
    translator.learn(TOKENS, hashes, "")
    (event,) = translator.translate(stored("window0", hashes[:1]))
    assert event["kv_cache_spec_kind"] == "sliding_window"
    assert event["kv_cache_spec_sliding_window"] == 4
    assert event["token_ids"] == TOKENS[:BLOCK] and event["parent_block_hash"] is None


@given(st.lists(st.sampled_from(range(5)), min_size=1, max_size=5, unique=True))
def test_any_order_of_blocks_is_cut_into_runs(order: list[int]) -> None:
    translator, reader = EventTranslator(SPEC, BLOCK), Reader()
    hashes = names()
    translator.learn(TOKENS, hashes, "")
    reader.read(translator.translate(stored("full0", hashes)))
    reader.read(translator.translate(stored("window0", [hashes[i] for i in order])))
    assert reader.holds()["window0"] == {hashes[i] for i in order}


def test_names_are_kept_for_the_latest_prompts_only() -> None:
    translator = EventTranslator(SPEC, BLOCK, kept_tokens=5 * BLOCK)
    old, new = names(), names(list(range(20)))
    translator.learn(TOKENS, old, "")
    translator.learn(list(range(20)), new, "")
    assert translator.translate(stored("full0", old)) == []
    assert len(translator.translate(stored("full0", new))) == 1
