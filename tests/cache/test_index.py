from __future__ import annotations

import pytest

from prfaas.cache.groups import GroupRule, rules_for
from prfaas.cache.index import NodeInfo, NodeMatch, PrefixIndex
from prfaas.types import BlockHash, ClusterId, HashEvent, NodeId
from tests.cache.builders import BLOCK, SPECS, hashes_of

A, B = NodeId("a"), NodeId("b")
HYBRID = rules_for(SPECS["hybrid"])


def info(node: NodeId, size: int = BLOCK, rules: tuple[GroupRule, ...] = HYBRID) -> NodeInfo:
    return NodeInfo(node, ClusterId("c"), size, rules)


def names(letters: str) -> tuple[BlockHash, ...]:
    return tuple(hashes_of([ord(x) for x in letters for _ in range(BLOCK)]))


def event(
    seq: int,
    hashes: tuple[BlockHash, ...],
    *,
    node: NodeId = A,
    group: str = "full0",
    action: str = "stored",
    size: int = BLOCK,
) -> HashEvent:
    return HashEvent(seq, node, group, size, hashes, action)  # type: ignore[arg-type]


def make(*events: HashEvent) -> PrefixIndex:
    index = PrefixIndex()
    index.join(info(A))
    index.join(info(B))
    for each in events:
        index.apply(each)
        index.check()
    return index


def match(index: PrefixIndex, letters: str) -> dict[NodeId, NodeMatch]:
    return index.match({BLOCK: list(names(letters))})


def test_attention_without_a_state_is_no_hit() -> None:
    index = make(event(0, names("abc")))
    assert match(index, "abcd") == {A: NodeMatch(0, 12)}
    index.apply(event(1, names("ab")[1:], group="linear0"))
    assert match(index, "abcd") == {A: NodeMatch(8, 12)}
    assert match(index, "a") == {A: NodeMatch(0, 4)}


def test_a_hole_ends_the_run() -> None:
    index = make(event(0, names("abc")), event(1, names("abc"), group="linear0"))
    index.apply(event(2, names("ab")[1:], action="removed"))
    assert match(index, "abc") == {A: NodeMatch(4, 4)}


def test_nodes_answer_for_themselves() -> None:
    index = make(
        event(0, names("abc")),
        event(1, names("abc")[2:], group="linear0"),
        event(0, names("ab"), node=B),
        event(1, names("ab"), node=B, group="linear0"),
    )
    assert match(index, "abc") == {A: NodeMatch(12, 12), B: NodeMatch(8, 8)}
    assert match(index, "abx") == {A: NodeMatch(0, 8), B: NodeMatch(8, 8)}
    assert match(index, "xyz") == {}


def test_a_state_beyond_the_run_is_of_no_use() -> None:
    index = make(
        event(0, names("ab")),
        event(1, names("abcd")[3:], group="linear0"),
        event(0, names("abcd"), node=B),
    )
    assert match(index, "abcd") == {A: NodeMatch(0, 8), B: NodeMatch(0, 16)}


def test_windows_and_several_groups() -> None:
    index = PrefixIndex()
    index.join(info(A, rules=rules_for(SPECS["all"])))
    chain = names("abcdef")
    for seq, (group, held) in enumerate(
        {"full0": chain, "full1": chain[:5], "linear0": chain[3:], "window0": chain[2:5]}.items()
    ):
        index.apply(event(seq, held, group=group))
    # full1 ends after 5; the window before 5 is blocks 3 and 4; a state is there.
    assert match(index, "abcdef") == {A: NodeMatch(20, 20)}
    index.apply(event(4, chain[4:5], group="window0", action="removed"))
    assert match(index, "abcdef") == {A: NodeMatch(16, 20)}
    index.apply(event(5, chain[2:3], group="window0", action="removed"))
    assert match(index, "abcdef") == {A: NodeMatch(0, 20)}


def test_a_model_of_states_only() -> None:
    index = PrefixIndex()
    index.join(info(A, rules=(GroupRule("linear0", "linear"),)))
    index.apply(event(0, names("abc")[1:2], group="linear0"))
    assert match(index, "abc") == {A: NodeMatch(8, 8)}
    assert match(index, "a") == {}


def test_every_node_at_its_own_block_size() -> None:
    index = PrefixIndex()
    index.join(info(A))
    index.join(info(B, size=8))
    tokens = list(range(24))
    from prfaas.cache.hashing import PromptHashes

    prompt = PromptHashes(tokens)
    for node, size in ((A, BLOCK), (B, 8)):
        for seq, group in enumerate(("full0", "linear0")):
            index.apply(event(seq, tuple(prompt.at(size)[:2]), node=node, group=group, size=size))
    assert set(index.block_sizes()) == {4, 8}
    found = index.match({size: prompt.at(size) for size in index.block_sizes()})
    assert found == {A: NodeMatch(8, 8), B: NodeMatch(16, 16)}


def test_an_early_event_is_dropped() -> None:
    index = make(event(0, names("a")))
    assert not index.apply(event(2, names("abc")[2:]))
    assert match(index, "abc")[A].attention_tokens == 4
    assert index.apply(event(1, names("abc")[1:]))
    assert match(index, "abc")[A].attention_tokens == 12
    assert index.stats.early_events == 1
    index.check()


def test_a_snapshot_repairs_an_index_that_has_missed_events() -> None:
    index = make(event(9, names("abc")))
    assert match(index, "abc") == {}
    assert index.snapshot(A, {"full0": names("a"), "linear0": names("a")}, next_seq=10)
    assert match(index, "abc") == {A: NodeMatch(4, 4)}
    assert not index.apply(event(9, names("abc")))
    assert index.apply(event(10, names("abc")))
    assert match(index, "abc") == {A: NodeMatch(4, 12)}


def test_duplicates_change_nothing() -> None:
    index = make(event(0, names("a")), event(1, names("a"), action="removed"))
    assert not index.apply(event(0, names("a")))
    assert index.stats.duplicate_events == 1
    assert match(index, "a") == {}


def test_bad_snapshots_are_refused() -> None:
    index = make(event(0, names("a")))
    assert not index.snapshot(NodeId("?"), {}, 0)
    assert not index.snapshot(A, {"nonsense": names("a")}, 0)
    assert match(index, "a") == {A: NodeMatch(0, 4)}
    assert (index.stats.unknown_node_events, index.stats.malformed_events) == (1, 1)


@pytest.mark.parametrize("wrong", [{"group": "nonsense"}, {"size": 16}])
def test_events_that_do_not_fit_the_node_are_dropped(wrong: dict[str, object]) -> None:
    index = make(event(0, names("a")))
    assert not index.apply(event(1, names("ab"), **wrong))  # type: ignore[arg-type]
    assert index.stats.malformed_events == 1
    assert match(index, "ab") == {A: NodeMatch(0, 4)}
    index.check()


def test_unknown_nodes_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    index = make()
    for _ in range(3):
        assert not index.apply(event(0, names("a"), node=NodeId("?")))
    assert index.stats.unknown_node_events == 3
    assert len(caplog.records) == 1


def test_a_node_that_leaves_takes_its_entries_along() -> None:
    index = make(event(0, names("ab")), event(0, names("abc"), node=B))
    index.leave(A)
    index.leave(A)
    index.check()
    assert match(index, "abc") == {B: NodeMatch(0, 12)}
    assert not index.apply(event(1, names("abc")))
    while index.sweep(1):
        index.check()
    assert len(index) == 3
    index.leave(B)
    assert len(index) == 0
    index.check()


def test_a_node_that_returns_starts_with_nothing() -> None:
    index = make(event(0, names("ab")))
    index.join(info(A))
    assert match(index, "ab") == {}
    assert index.apply(event(0, names("a")))  # a restarted node counts anew
    assert match(index, "ab") == {A: NodeMatch(0, 4)}
    index.check()


def test_lanes_are_reused_only_after_a_sweep() -> None:
    index = make(event(0, names("ab")), event(0, names("xy"), node=B))
    for _ in range(20):
        index.leave(A)
        index.join(info(A))
        assert match(index, "ab") == {}
        index.check()
    assert index.sweep() > 0 and index.sweep() == 0
    index.leave(A)
    index.join(info(A))
    assert match(index, "ab") == {} and match(index, "xy") == {B: NodeMatch(0, 8)}
    index.check()


def test_check_sees_broken_books() -> None:
    index = make(event(0, names("a")))
    index._holders._holders[names("b")[0]] = 1 << 60
    with pytest.raises(AssertionError):
        index.check()


def test_the_log_line_of_a_bad_snapshot_is_short(caplog: pytest.LogCaptureFixture) -> None:
    index = PrefixIndex()
    index.join(info(A))
    assert not index.snapshot(A, {f"group{n}": [] for n in range(5000)}, 0)
    (record,) = caplog.records
    assert "5000 unknown groups" in record.getMessage() and len(record.getMessage()) < 200
