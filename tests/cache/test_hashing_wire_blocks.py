"""vLLM's events, announced as blocks of another size than vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cache.groups import GroupRule
from prfaas.cache.hashing import EngineHashes, block_hashes, hash_events, vllm, wire_blocks
from prfaas.cache.index import NodeInfo, NodeMatch, PrefixIndex
from prfaas.types import ClusterId, HashEvent, NodeId
from tests.cache.builders import SEEDED

Prefix = tuple[int, ...]
NODE = NodeId("n")
STATES = frozenset({"linear0"})
CLEARED = {"type": "AllBlocksCleared"}


def engine_hash(prefix: Sequence[int]) -> bytes:
    return b"engine" + bytes(prefix)


def stored(
    tokens: Sequence[int], size: int, first: int = 0, group: int = 0, keep: int = -1, **more: Any
) -> dict[str, Any]:
    """Blocks `first` and later of a prompt. `keep`: bit per block that the group retains."""
    ends = range((first + 1) * size, len(tokens) + 1, size)
    kept = [end for bit, end in enumerate(ends) if keep >> bit & 1]
    stop = ends[-1] if ends else first * size
    return {
        "type": "BlockStored",
        "block_hashes": [engine_hash(tokens[:end]) for end in kept],
        "parent_block_hash": engine_hash(tokens[: first * size]) if first else None,
        "token_ids": list(tokens[first * size : stop]),
        "block_size": size,
        "group_idx": group,
    } | more


def removed(*prefixes: Sequence[int], group: int = 0) -> dict[str, Any]:
    hashes = [engine_hash(prefix) for prefix in prefixes]
    return {"type": "BlockRemoved", "block_hashes": hashes, "group_idx": group}


def payload(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


class Reader:
    """An engine, and a reader that applies its events to what it has."""

    def __init__(self, wire: int, names: dict[int, str] | None = None) -> None:
        self.wire = wire
        self.names = names or {0: "full0"}
        self.engine = EngineHashes(NODE, self.names, 5, wire, STATES)
        self.held: dict[str, set[bytes]] = {name: set() for name in self.names.values()}
        self._next = 5

    def feed(self, *events: object) -> list[HashEvent]:
        translated = hash_events(self.engine, payload(*events))
        for event in translated:
            assert event.seq == self._next and event.block_tokens == self.wire
            self._next += 1
            before = self.held[event.group]
            changed = set(event.hashes)
            assert len(changed) == len(event.hashes) > 0, "a block is listed twice"
            if event.action == "stored":
                assert not changed & before, "a block is stored that was held"
                self.held[event.group] = before | changed
            else:
                assert changed <= before, "a block is removed that was not held"
                self.held[event.group] = before - changed
        assert self.engine.next_seq == self._next, "the numbers have a gap"
        holdings = self.engine.holdings()
        assert {group: set(names) for group, names in holdings.items()} == self.held
        assert all(len(names) == len(set(names)) for names in holdings.values())
        self.engine.check()
        return translated

    def positions(self, tokens: Sequence[int], group: str = "full0") -> list[int]:
        """The blocks of a prompt that the group holds."""
        names = block_hashes(list(tokens), self.wire)
        return [i for i, name in enumerate(names) if name in self.held[group]]


class Model:
    """Keeps the prefixes at whose ends an engine holds a block, as (size, prefix), and derives the
    rest token by token."""

    def __init__(self, names: dict[int, str], sizes: Sequence[int], wire: int) -> None:
        self.names, self.sizes, self.wire = names, sizes, wire
        self.blocks: dict[int, set[tuple[int, Prefix]]] = {number: set() for number in names}

    def apply(self, events: Sequence[dict[str, Any]]) -> None:
        known = {block for blocks in self.blocks.values() for block in blocks}
        for event in events:
            if event["type"] == "BlockStored":
                known |= set(self._named(event, known))
        for event in events:
            if event is CLEARED:
                for blocks in self.blocks.values():
                    blocks.clear()
                continue
            number = event["group_idx"]
            for key in event["block_hashes"]:
                prefix = tuple(key.removeprefix(b"engine"))
                if event["type"] == "BlockRemoved":
                    self.blocks[number] -= {(size, prefix) for size in self.sizes}
                    continue
                places = [event["block_size"]]
                if self.names[number] in STATES:
                    places += self.sizes
                for size in places:
                    if (size, prefix) in known:
                        self.blocks[number].add((size, prefix))
                        break

    def _named(
        self, event: dict[str, Any], known: set[tuple[int, Prefix]]
    ) -> Iterator[tuple[int, Prefix]]:
        size, parent = event["block_size"], event["parent_block_hash"]
        prefix: Prefix = () if parent is None else tuple(parent.removeprefix(b"engine"))
        if prefix and (size, prefix) not in known:
            return
        if len(event["block_hashes"]) * size == len(event["token_ids"]):
            for key in event["block_hashes"]:
                yield size, tuple(key.removeprefix(b"engine"))

    def held(self) -> dict[str, set[bytes]]:
        prefixes = {
            prefix[:length]
            for blocks in self.blocks.values()
            for _, prefix in blocks
            for length in range(self.wire, len(prefix) + 1, self.wire)
        }
        return {
            name: {
                block_hashes(list(prefix), self.wire)[-1]
                for prefix in prefixes
                if all(self._has(n, prefix) for n, other in self.names.items() if other == name)
            }
            for name in self.names.values()
        }

    def _has(self, number: int, wire: Prefix) -> bool:
        blocks = self.blocks[number]
        if self.names[number] in STATES:
            return any(prefix == wire for _, prefix in blocks)
        return any(
            all(
                any(
                    len(prefix) - size <= token < len(prefix)
                    and prefix[: token + 1] == wire[: token + 1]
                    for other, prefix in blocks
                    if other == size
                )
                for token in range(len(wire) - self.wire, len(wire))
            )
            for size in set(self.sizes)
        )


# Prompts that begin alike: zeros, with at most one token that differs.
PROMPTS = st.tuples(
    st.sampled_from([2, 5, 9, 14, 99]), st.sampled_from([6, 10, 12, 15, 18, 20])
).map(lambda pair: tuple(int(token == pair[0]) for token in range(pair[1])))
ONE = {0: "full0"}
EACH = {0: "full0", 1: "window0", 2: "linear0"}
TOGETHER = {0: "full0", 1: "full0", 2: "window0"}
STATES_ONLY = {0: "linear0", 1: "linear0"}
History = tuple[Model, list[list[dict[str, Any]]]]


@st.composite
def histories(draw: st.DrawFn, names: dict[int, str], sizes_differ: bool | None) -> History:
    """`sizes_differ`: group 1 has other blocks than the others. None: all have wire blocks."""
    size, wire, other = (draw(st.integers(1, 7)) for _ in range(3))
    sizes = [size, other if sizes_differ else size, size]
    model = Model(names, sizes, size if sizes_differ is None else wire)

    def event() -> dict[str, Any]:
        number = draw(st.sampled_from(sorted(names)))
        prompt = draw(PROMPTS)
        first = draw(st.sampled_from([0, 0, 1, 2]))
        match draw(st.integers(0, 7)):
            case 0:
                return CLEARED
            case 1 | 2 | 3:
                ends = range(sizes[number], len(prompt) + 1, sizes[number])[first : first + 3]
                return removed(*(prompt[:end] for end in ends), group=number)
            case _:
                first = min(first, len(prompt) // sizes[number])
                keep = draw(st.sampled_from([-1, -1, -1, 2, 5]))
                return stored(prompt, sizes[number], first, number, keep)

    steps = draw(st.lists(st.integers(1, 3), min_size=1, max_size=10))
    return model, [[event() for _ in range(count)] for count in steps]


def follow(history: History) -> None:
    model, payloads = history
    reader = Reader(model.wire, model.names)
    for events in payloads:
        reader.feed(*events)
        model.apply(events)
        assert reader.held == model.held()
    # Every record belongs to something that is held.
    for number, blocks in model.blocks.items():
        reader.feed(removed(*(prefix for _, prefix in blocks), group=number))
    assert reader.engine.records == 0


@settings(SEEDED, max_examples=60)
@given(histories(ONE, False))
def test_held_blocks_are_those_of_a_model_that_knows_every_token(history: History) -> None:
    follow(history)


@settings(SEEDED, max_examples=80)
@given(histories(EACH, False))
def test_windows_and_states_follow_the_model(history: History) -> None:
    follow(history)


@settings(SEEDED, max_examples=60)
@given(histories(EACH, True))
def test_groups_with_blocks_of_different_sizes_follow_the_model(history: History) -> None:
    follow(history)


@settings(SEEDED, max_examples=80)
@given(histories(TOGETHER, True))
def test_groups_of_one_name_follow_the_model(history: History) -> None:
    follow(history)


@settings(SEEDED, max_examples=30)
@given(histories(STATES_ONLY, True))
def test_a_model_of_states_alone_follows_the_model(history: History) -> None:
    follow(history)


@settings(SEEDED, max_examples=60)
@given(histories(EACH, None))
def test_blocks_of_the_same_size_are_announced_as_they_are(history: History) -> None:
    """The same events as without a wire block size."""
    model, payloads = history
    with_size = EngineHashes(NODE, model.names, 0, model.wire, STATES)
    without = EngineHashes(NODE, model.names)
    for events in payloads:
        assert hash_events(with_size, payload(*events)) == hash_events(without, payload(*events))
        assert with_size.holdings() == without.holdings()
    follow(history)


@settings(SEEDED, max_examples=100)
@given(
    st.integers(1, 7),
    st.integers(1, 7),
    st.lists(st.sampled_from([None, ["image"], [b"embedding"]]), min_size=8, max_size=8),
    st.lists(st.integers(1, 3), min_size=8, max_size=8),
)
def test_a_chain_in_pieces_has_the_names_of_the_whole_chain(
    size: int, wire: int, keys: list[list[Any] | None], pieces: list[int]
) -> None:
    tokens = tuple(range(8 * size))
    whole, in_pieces = Reader(wire), Reader(wire)
    keys = [["salt", *(keys[0] or [])], *keys[1:]]
    whole.feed(stored(tokens, size, extra_keys=keys))
    first = 0
    for blocks in pieces:
        some = keys[first : first + blocks]
        in_pieces.feed(stored(tokens[: (first + blocks) * size], size, first, extra_keys=some))
        first = min(8, first + blocks)
    assert in_pieces.held == whole.held
    text = block_hashes(list(tokens), wire, salt="salt")
    plain = next((i for i, key in enumerate(keys[1:], 1) if key), 8) * size
    if len(keys[0] or ()) > 1:
        plain = 0
    assert [name in whole.held["full0"] for name in text] == [
        (block + 1) * wire <= plain for block in range(len(text))
    ]


# Examples -----------------------------------------------------------------------------------------

TOKENS = tuple(range(1, 25))


def test_a_small_engine_block_completes_a_large_wire_block() -> None:
    reader = Reader(8)
    assert reader.feed(stored(TOKENS[:6], 2)) == []
    reader.feed(stored(TOKENS[:8], 2, 3))
    assert reader.positions(TOKENS) == [0]
    reader.feed(stored(TOKENS, 2, 4))
    assert reader.positions(TOKENS) == [0, 1, 2]
    reader.feed(removed(TOKENS[:4]))
    assert reader.positions(TOKENS) == [1, 2]
    reader.feed(removed(TOKENS[:6]))
    reader.feed(stored(TOKENS[:4], 2, 1))
    assert reader.positions(TOKENS) == [1, 2]
    reader.feed(stored(TOKENS[:6], 2, 2))
    assert reader.positions(TOKENS) == [0, 1, 2]


def test_a_large_engine_block_brings_several_wire_blocks() -> None:
    """Prompts that differ inside the engine block share the wire blocks before the difference."""
    other = (*TOKENS[:10], 99, 99)
    reader = Reader(4)
    reader.feed(stored(TOKENS[:12], 12))
    assert reader.positions(TOKENS) == [0, 1, 2]
    (event,) = reader.feed(stored(other, 12))
    assert len(event.hashes) == 1
    reader.feed(removed(TOKENS[:12]))
    assert reader.positions(TOKENS) == [0, 1] and reader.positions(other) == [0, 1, 2]
    reader.feed(removed(other))
    assert reader.held == {"full0": set()}


def test_sizes_of_which_neither_is_a_multiple_of_the_other() -> None:
    reader = Reader(4)
    reader.feed(stored(TOKENS[:12], 6))
    assert reader.positions(TOKENS) == [0, 1, 2]
    reader.feed(removed(TOKENS[:6]))
    assert reader.positions(TOKENS) == [2]
    reader.feed(stored(TOKENS[:6], 6))
    assert reader.positions(TOKENS) == [0, 1, 2]


def test_a_block_returns_for_every_prompt_that_went_on_after_it() -> None:
    prompts = [(*TOKENS[:4], 30 + n, 30 + n) for n in range(5)]
    reader = Reader(6)
    for prompt in prompts:
        reader.feed(stored(prompt, 2))
    (event,) = reader.feed(removed(TOKENS[:2]))
    assert len(event.hashes) == 5
    (event,) = reader.feed(stored(TOKENS[:2], 2))
    assert len(event.hashes) == 5
    assert all(reader.positions(prompt) == [0] for prompt in prompts)


def test_a_state_counts_where_both_kinds_of_blocks_end() -> None:
    reader = Reader(4, {0: "full0", 1: "linear0"})
    reader.feed(stored(TOKENS, 6), stored(TOKENS, 6, group=1))
    assert reader.positions(TOKENS) == [0, 1, 2, 3, 4, 5]
    assert reader.positions(TOKENS, "linear0") == [2, 5]  # after 12 and 24 tokens
    reader.feed(removed(TOKENS[:6], TOKENS[:12], group=1))
    assert reader.positions(TOKENS, "linear0") == [5]
    # The state needs no other block of its group, and not even the attention.
    reader.feed(removed(*(TOKENS[:end] for end in range(6, 25, 6))))
    assert reader.held["full0"] == set() and reader.positions(TOKENS, "linear0") == [5]


def test_a_state_takes_its_place_from_blocks_of_another_size() -> None:
    reader = Reader(4, {0: "full0", 1: "linear0"})
    sparse = stored(TOKENS, 12, group=1, keep=2)  # the state after 24 tokens only
    reader.feed(sparse, stored(TOKENS, 8))
    assert reader.positions(TOKENS, "linear0") == [5]
    reader.feed(removed(TOKENS, group=1))
    assert reader.held["linear0"] == set()


def test_a_window_needs_a_position_of_its_own_size() -> None:
    """An attention block of another size does not say which tokens the window's block has."""
    reader = Reader(4, {0: "full0", 1: "window0"})
    reader.feed(stored(TOKENS, 8), stored(TOKENS, 4, group=1, keep=0b101000))
    assert reader.held["window0"] == set() and reader.engine.unnamed == 2
    reader.feed(stored(TOKENS, 4, group=1))
    assert reader.positions(TOKENS, "window0") == [0, 1, 2, 3, 4, 5]


def test_groups_of_one_name_hold_a_block_together() -> None:
    reader = Reader(4, {0: "full0", 1: "window0", 2: "window0", 3: "window0"})
    reader.feed(stored(TOKENS, 8), stored(TOKENS, 8, group=1), stored(TOKENS, 2, group=2))
    assert reader.held["window0"] == set()
    reader.feed(stored(TOKENS[:16], 8, group=3))
    assert reader.positions(TOKENS, "window0") == [0, 1, 2, 3]
    reader.feed(removed(TOKENS[:6], group=2))
    assert reader.positions(TOKENS, "window0") == [0, 2, 3]
    reader.feed(stored(TOKENS[:6], 2, 2, group=2), removed(TOKENS[:16], group=1))
    assert reader.positions(TOKENS, "window0") == [0, 1]


def test_a_group_with_several_names_counts_for_each() -> None:
    """vLLM without its hybrid manager has one group for layers with and without a window."""
    names: dict[int, Any] = {0: ("full0", "window0", "full0"), 1: "window0"}
    engine = EngineHashes(NODE, names, 0, 4, STATES)
    (event,) = hash_events(engine, payload(stored(TOKENS, 6)))
    held = block_hashes(TOKENS, 4)
    assert (event.group, event.hashes) == ("full0", tuple(held))
    (event,) = hash_events(engine, payload(stored(TOKENS[:12], 6, group=1)))
    assert (event.group, event.hashes) == ("window0", tuple(held[:3]))
    gone = hash_events(engine, payload(removed(TOKENS[:12])))
    assert [(e.action, e.group, e.hashes) for e in gone] == [
        ("removed", "full0", (held[1], held[2])),
        ("removed", "window0", (held[1], held[2])),
    ]
    assert engine.holdings() == {"full0": [held[0], *held[3:]], "window0": [held[0]]}


def test_partial_blocks_of_a_group_do_not_hide_removals() -> None:
    """vLLM announces the end of a prompt in smaller blocks than the rest, when it is told to match
    prefixes in smaller units. The group's other blocks keep their size."""
    for wire in (0, 8):
        engine = EngineHashes(NODE, {0: "full0"}, 0, wire)
        hash_events(engine, payload(stored(TOKENS[:8], 8), stored(TOKENS[20:24], 4)))
        (event,) = hash_events(engine, payload(removed(TOKENS[:8])))
        assert event.hashes == tuple(block_hashes(TOKENS[:8], 8)) and event.block_tokens == 8


def test_blocks_return_after_everything_was_cleared_in_the_same_payload() -> None:
    reader = Reader(4)
    reader.feed(stored(TOKENS, 6))
    reader.feed(CLEARED, stored(TOKENS, 6, 2))
    assert reader.positions(TOKENS) == [3, 4, 5]
    reader.feed(CLEARED)
    assert reader.engine.records == 0


def test_a_block_that_was_removed_before_everything_was_cleared_stays_unknown() -> None:
    reader = Reader(4)
    reader.feed(stored(TOKENS[:12], 6))
    reader.feed(removed(TOKENS[:6]))
    reader.feed(CLEARED, stored(TOKENS[:12], 6, keep=1))  # without a position
    assert reader.held == {"full0": set()} and reader.engine.unnamed == 1
    assert reader.engine.records == 0


def test_an_index_matches_a_prompt_that_was_announced_in_other_blocks() -> None:
    rules = (GroupRule("full0", "full"), GroupRule("linear0", "linear"))
    index = PrefixIndex()
    index.join(NodeInfo(NODE, ClusterId("c"), 4, rules), next_seq=5)
    reader = Reader(4, {0: "full0", 1: "linear0"})
    for event in reader.feed(stored(TOKENS, 6), stored(TOKENS, 6, group=1)):
        assert index.apply(event)
    for tokens, match in ((24, 24), (23, 12), (12, 12), (11, 0)):
        found = index.match({4: block_hashes(TOKENS[:tokens], 4)})
        assert found == {NODE: NodeMatch(match, tokens // 4 * 4)}


# Hostile engines ----------------------------------------------------------------------------------


def test_an_unknown_parent_is_not_claimed() -> None:
    reader = Reader(4)
    reader.feed(stored(TOKENS, 6, 2))
    assert reader.held == {"full0": set()} and reader.engine.unnamed == 2
    # A block that is only kept for its successors is unknown as well.
    reader.feed(stored(TOKENS[:12], 6))
    reader.feed(removed(TOKENS[:6]))
    reader.feed(stored((*TOKENS[:6], *range(50, 56)), 6, 1))
    assert reader.engine.unnamed == 3 and reader.positions(TOKENS) == [2]


def test_two_hashes_for_the_same_tokens_are_not_counted_as_one_chain() -> None:
    reader = Reader(6)
    reader.feed(stored(TOKENS[:6], 2))
    other = stored(TOKENS[:6], 2)
    other["block_hashes"] = [b"a", b"b", b"c"]
    reader.feed(other)
    assert reader.engine.unnamed == 1
    reader.feed(removed(TOKENS[:4]))
    assert reader.held == {"full0": set()}
    reader.feed(removed(TOKENS[:2], TOKENS[:6]))
    reader.feed({"type": "BlockRemoved", "block_hashes": [b"a", b"b"]})
    assert reader.engine.records == 0


def test_one_hash_for_two_prefixes_keeps_its_first_meaning() -> None:
    reader = Reader(4)
    reader.feed(stored(TOKENS[:6], 6))
    later = stored(TOKENS[:12], 6)
    later["block_hashes"] = [engine_hash(TOKENS[:6])] * 2
    reader.feed(later)
    assert reader.positions(TOKENS) == [0]
    reader.feed(removed(TOKENS[:6]))
    assert reader.engine.records == 0


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "MOST_RECORDS", 100)
    for size, wire in ((1, 1), (1, 50), (12, 1), (6, 4)):
        reader = Reader(wire)
        for number in range(200):
            prompt = tuple((number + token) % 251 for token in range(24))
            reader.feed(stored(prompt, size))
            assert reader.engine.records <= 100
        assert reader.engine.unnamed > 0
        # What is held is still right, and there is room again when it is gone.
        reader.feed(CLEARED)
        reader.feed(stored(TOKENS[:12], size))
        assert len(reader.positions(TOKENS)) == 12 // wire


def test_the_number_of_block_sizes_is_bounded() -> None:
    reader = Reader(4)
    for size in range(1, 40):
        reader.feed(stored(tuple(range(100, 140)), size))
    assert reader.engine.unnamed > 0
    assert len(reader.engine._by_size) == vllm.MOST_SIZES


def test_a_payload_that_changes_too_much_leaves_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes could otherwise make the kvd list every block again and again."""
    prompts = [(*TOKENS[:4], 30 + n, 30 + n) for n in range(50)]
    engine = EngineHashes(NODE, {0: "full0"}, 0, 6)
    for prompt in prompts:
        hash_events(engine, payload(stored(prompt, 2)))
    assert len(engine.holdings()["full0"]) == 50
    monkeypatch.setattr(vllm, "MOST_CHANGES", 120)
    before = engine.next_seq
    again = [removed(TOKENS[:2]), stored(TOKENS[:2], 2)]
    assert len(hash_events(engine, payload(*again))) == 2 and engine.malformed == 0
    assert hash_events(engine, payload(*again, *again)) == []
    assert engine.next_seq > before + 2 and engine.malformed == 1
    assert engine.holdings() == {"full0": []} and engine.records == 0
    hash_events(engine, payload(stored(prompts[0], 2)))
    assert len(engine.holdings()["full0"]) == 1
    monkeypatch.setattr(wire_blocks, "MOST_CHANGES", 3)
    for prompt in prompts[:5]:
        hash_events(engine, payload(stored(prompt, 2)))
    assert hash_events(engine, payload(removed(TOKENS[:2]))) == []
    assert engine.malformed == 2 and engine.records == 0


@settings(SEEDED, max_examples=80)
@given(
    st.integers(0, 5),
    st.lists(
        st.lists(
            st.fixed_dictionaries(
                {"type": st.sampled_from(["BlockStored", "BlockStored", "BlockRemoved"])},
                optional={
                    "block_hashes": st.lists(st.integers(0, 5), max_size=4),
                    "token_ids": st.lists(st.integers(0, 1), max_size=12),
                    "parent_block_hash": st.none() | st.integers(0, 5),
                    "block_size": st.integers(-1, 6),
                    "group_idx": st.integers(-1, 2),
                    "extra_keys": st.none() | st.lists(st.lists(st.text(max_size=2), max_size=2)),
                },
            )
            | st.just(CLEARED),
            max_size=4,
        ),
        max_size=6,
    ),
)
def test_inconsistent_events_leave_a_consistent_state(
    wire: int, payloads: list[list[dict[str, Any]]]
) -> None:
    engine = EngineHashes(NODE, {0: "full0", 1: "linear0", 2: "full0"}, 0, wire, STATES)
    held: dict[str, set[bytes]] = {"full0": set(), "linear0": set()}
    for events in payloads:
        for event in hash_events(engine, payload(*events)):
            one = set(event.hashes)
            stores = event.action == "stored"
            held[event.group] = held[event.group] | one if stores else held[event.group] - one
        engine.check()
        assert {group: set(names) for group, names in engine.holdings().items()} == held
