from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.cache.groups import GroupRule
from prfaas.cache.hashing import EngineHashes, block_hashes, hash_events
from prfaas.cache.index import NodeInfo, NodeMatch, PrefixIndex
from prfaas.types import ClusterId, HashEvent, NodeId
from tests.cache.builders import SEEDED

SIZE = 4
GROUPS = {0: "full0", 1: "linear0"}
FIELDS = (
    "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys "
    "group_idx kv_cache_spec_kind kv_cache_spec_sliding_window"
).split()


def engine() -> EngineHashes:
    return EngineHashes(NodeId("n"), GROUPS)


def stored(tokens: list[int], hashes: list[Any], **more: Any) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": None,
        "token_ids": tokens,
        "block_size": SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
    } | more


def removed(hashes: list[Any], group: int = 0) -> dict[str, Any]:
    return {
        "type": "BlockRemoved",
        "block_hashes": hashes,
        "medium": "GPU",
        "group_idx": group,
    }


def payload(*events: object) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


def as_array(event: dict[str, Any]) -> list[Any]:
    """The encoding before v0.24."""
    fields = FIELDS if event["type"] == "BlockStored" else ["block_hashes", "medium", "group_idx"]
    return [event["type"], *(event[field] for field in fields)]


def feed(to: EngineHashes, *events: object) -> list[tuple[str, str, tuple[bytes, ...]]]:
    translated = hash_events(to, payload(*events))
    to.check()
    return [(event.action, event.group, event.hashes) for event in translated]


@pytest.mark.parametrize("form", [dict, as_array], ids=["maps", "arrays"])
def test_stored_blocks_get_our_names(form: Any) -> None:
    tokens = list(range(8))
    names = tuple(block_hashes(tokens, SIZE))
    to = engine()
    assert feed(to, form(stored(tokens, [11, b"x" * 32]))) == [("stored", "full0", names)]
    assert feed(to, form(removed([b"x" * 32]))) == [("removed", "full0", names[1:])]
    assert feed(to, form(removed([b"x" * 32]))) == []
    assert to.malformed == 0


def test_a_chain_goes_on_from_its_parent() -> None:
    tokens = list(range(12))
    names = block_hashes(tokens, SIZE)
    to = engine()
    feed(to, stored(tokens[:4], [1]))
    more = feed(to, stored(tokens[4:], [2, 3], parent_block_hash=1))
    assert more == [("stored", "full0", tuple(names[1:]))]


def test_an_unknown_parent_is_not_claimed(caplog: pytest.LogCaptureFixture) -> None:
    to = engine()
    for _ in range(2):
        assert feed(to, stored([1, 2, 3, 4], [5], parent_block_hash=99)) == []
    assert to.unnamed == 2
    assert to.next_seq == 0
    assert len(caplog.records) == 1


def test_states_take_their_place_from_the_attention_blocks() -> None:
    tokens = list(range(12))
    names = block_hashes(tokens, SIZE)
    to = engine()
    state = stored(tokens, [33], group_idx=1, kv_cache_spec_kind="mamba", extra_keys=[None])
    # The state's event may come first; block 2 is the one retained.
    assert feed(to, state, stored(tokens, [11, 22, 33])) == [
        ("stored", "linear0", (names[2],)),
        ("stored", "full0", tuple(names)),
    ]
    assert feed(to, removed([33], group=0)) == [("removed", "full0", (names[2],))]
    assert feed(to, removed([33], group=1)) == [("removed", "linear0", (names[2],))]


def test_empty_hashes_mean_not_retained() -> None:
    to = engine()
    assert feed(to, stored(list(range(8)), [], group_idx=1)) == []
    assert (to.malformed, to.unnamed, to.next_seq) == (0, 0, 0)


def test_salt_and_adapter_come_from_the_extra_keys() -> None:
    tokens = list(range(8))
    keys = [["adapter", "tenant"], ["adapter"]]
    event = stored(tokens, [1, 2], lora_name="adapter", extra_keys=keys)
    names = tuple(block_hashes(tokens, SIZE, salt="tenant", adapter="adapter"))
    assert feed(engine(), event) == [("stored", "full0", names)]
    salted = stored(tokens, [1, 2], extra_keys=[["tenant"], None])
    assert feed(engine(), salted)[0][2] == tuple(block_hashes(tokens, SIZE, salt="tenant"))


def test_images_and_embeddings_change_the_name() -> None:
    tokens = list(range(8))
    image = stored(tokens, [1, 2], extra_keys=[[["img", 0], "tenant"], [b"embedding"]])
    names = feed(engine(), image)[0][2]
    plain = block_hashes(tokens, SIZE, salt="tenant")
    assert names[0] != plain[0]
    assert names[1] != block_hashes(tokens[4:], SIZE, parent=names[0])[0]  # type: ignore[arg-type]


def test_offloaded_copies_are_not_announced() -> None:
    to = engine()
    assert feed(to, stored([1, 2, 3, 4], [1], medium="CPU")) == []
    assert feed(to, stored([1, 2, 3, 4], [1])) != []
    assert feed(to, removed([1]) | {"medium": "CPU"}) == []
    assert len(to.holdings()["full0"]) == 1


def test_cleared_removes_everything() -> None:
    tokens = list(range(8))
    names = set(block_hashes(tokens, SIZE))
    to = engine()
    feed(to, stored(tokens, [1, 2]), stored(tokens, [2], group_idx=1))
    gone = feed(to, {"type": "AllBlocksCleared"})
    assert {(action, group) for action, group, _ in gone} == {
        ("removed", "full0"),
        ("removed", "linear0"),
    }
    assert set(gone[0][2]) == names
    assert to.holdings() == {"full0": [], "linear0": []}


def test_a_snapshot_settles_a_gap() -> None:
    tokens = list(range(8))
    names = block_hashes(tokens, SIZE)
    rules = (GroupRule("full0", "full"), GroupRule("linear0", "linear"))
    index = PrefixIndex()
    index.join(NodeInfo(NodeId("n"), ClusterId("c"), SIZE, rules))
    to = engine()
    for event in hash_events(to, payload(stored(tokens[:4], [1]))):
        index.apply(event)
    hash_events(to, b"unreadable")
    for event in hash_events(
        to,
        payload(
            stored(tokens[4:], [2], parent_block_hash=1),
            stored(tokens[4:], [2], parent_block_hash=1, group_idx=1),
        ),
    ):
        assert not index.apply(event)
    assert index.snapshot(NodeId("n"), to.holdings(), to.next_seq)
    assert index.match({SIZE: names}) == {NodeId("n"): NodeMatch(8, 8)}
    (removal,) = hash_events(to, payload(removed([2], group=1)))
    assert index.apply(removal)
    assert index.match({SIZE: names}) == {NodeId("n"): NodeMatch(0, 8)}


@pytest.mark.parametrize(
    "bad",
    [
        b"\xc1",
        b"",
        msgspec.msgpack.encode(7),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode([1.0, 5]),
        payload(3),
        payload([]),
        payload({"type": "Surprise"}),
        payload({"type": ["BlockStored"]}),
        payload(stored([1, 2, 3], [1])),
        payload(stored([1, 2, 3, 4], [1, 2])),
        payload(stored([1, 2, 3, 4], [1], block_size=0)),
        payload(stored([-1, 2, 3, 4], [1])),
        payload(stored([1, 2, 3, 2**40], [1])),
        payload(stored([1, 2, 3, 4], [1], group_idx=7)),
        payload(stored([1, 2, 3, 4], ["x"])),
        payload(stored([1, 2, 3, 4], [1], extra_keys=[5])),
        payload(removed([1], group=-1)),
    ],
)
def test_what_cannot_be_read_leaves_a_gap(bad: bytes, caplog: pytest.LogCaptureFixture) -> None:
    to = engine()
    for times in (1, 2):
        assert hash_events(to, bad) == []
        assert (to.malformed, to.next_seq) == (times, times)
    assert len(caplog.records) == 1
    to.check()


@settings(SEEDED, max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner, max_size=5)
            | st.dictionaries(st.sampled_from(["type", *FIELDS]), inner, max_size=5)
        ),
        max_leaves=20,
    )
    | st.lists(
        st.fixed_dictionaries(
            {"type": st.sampled_from(["BlockStored", "BlockRemoved"])},
            optional={
                "block_hashes": st.lists(st.integers(0, 5)),
                "token_ids": st.lists(st.integers(0, 9)),
                "parent_block_hash": st.none() | st.integers(0, 5),
                "block_size": st.integers(-1, 4),
                "group_idx": st.integers(-1, 2),
                "extra_keys": st.none() | st.lists(st.lists(st.text())),
            },
        )
    ).map(lambda events: [0.0, events])
)
def test_nothing_an_engine_sends_raises(message: object) -> None:
    to = engine()
    for event in hash_events(to, msgspec.msgpack.encode(message)):
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=HashEvent) == event
    to.check()


@settings(SEEDED, max_examples=150)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.lists(st.integers(0, 1), max_size=5)))
)
def test_holdings_are_the_sum_of_the_events(
    steps: list[tuple[bool, int, list[int]]],
) -> None:
    """An engine that stores and removes prefixes of prompts, in both groups."""
    to = engine()
    held: dict[str, set[bytes]] = {"full0": set(), "linear0": set()}
    for store, drop, blocks in steps:
        tokens = [block for block in blocks for _ in range(SIZE)]
        names = [b"engine" + h for h in block_hashes(tokens, SIZE)]
        if store:
            events = [stored(tokens, names), stored(tokens, names[-1:], group_idx=1)]
        else:
            events = [removed(names[drop:]), removed(names[drop:], group=1)]
        for action, group, hashes in feed(to, *events):
            held[group] = (
                held[group] | set(hashes) if action == "stored" else held[group] - set(hashes)
            )
    assert {group: set(hashes) for group, hashes in to.holdings().items()} == held


@pytest.mark.parametrize(
    "bad",
    [b"\x91" * 5_000 + b"\xc0", payload(stored([], []) | {"block_size": 2**62})],
    ids=["nested too deeply", "an empty block of any size"],
)
def test_hostile_payloads_leave_a_gap_as_well(bad: bytes) -> None:
    to = engine()
    assert hash_events(to, bad) == []
    assert to.next_seq == 1 and to.malformed == 1
