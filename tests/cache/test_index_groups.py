"""Many nodes of few kinds: the groups of a match against a trial of every length at every node."""

from __future__ import annotations

from random import Random

from prfaas.cache.groups import rules_for
from prfaas.cache.hashing import PromptHashes
from prfaas.cache.index import NodeInfo, PrefixIndex
from prfaas.types import ClusterId, HashEvent, NodeId
from tests.cache.builders import BLOCK, SPECS
from tests.cache.test_index_machine import Sender

NODES = 40
PROMPT = PromptHashes([token // BLOCK for token in range(12 * BLOCK)])


def filled(draw: Random) -> tuple[PrefixIndex, list[Sender]]:
    index, senders = PrefixIndex(), []
    for number in range(NODES):
        rules = rules_for(SPECS[draw.choice(["hybrid", "all", "linear"])])
        sender = Sender(NodeInfo(NodeId(f"n{number}"), ClusterId("c"), BLOCK, rules))
        index.join(sender.info)
        if draw.random() < 0.2:  # its lanes are left behind
            index.leave(sender.info.node)
            continue
        senders.append(sender)
        for seq, rule in enumerate(rules):
            chain, share = PROMPT.at(BLOCK), draw.choice([0.3, 0.8, 1.0])
            held = tuple(name for name in chain[: draw.randint(0, 12)] if draw.random() < share)
            sender.held[rule.name] |= set(held)
            index.apply(HashEvent(seq, sender.info.node, rule.name, BLOCK, held, "stored"))
    return index, senders


def test_groups_are_the_matches_of_all_nodes() -> None:
    draw = Random(0)
    sizes = []
    for _ in range(30):
        index, senders = filled(draw)
        index.check()
        expected = {s.info.node: s.hit_tokens(PROMPT) for s in senders}
        groups = index.match_groups({BLOCK: PROMPT.at(BLOCK)})
        found = {}
        for match, nodes in groups:
            members = [node for node, number in index.numbers.items() if nodes >> number & 1]
            assert members and nodes.bit_count() == len(members), "a bit has no node"
            assert not found.keys() & set(members), "a node is in two groups"
            found |= dict.fromkeys(members, (match.tokens, match.attention_tokens))
            sizes.append(len(members))
        assert found == {node: hit for node, hit in expected.items() if hit[1]}
        matches = index.match({BLOCK: PROMPT.at(BLOCK)})
        assert {n: (m.tokens, m.attention_tokens) for n, m in matches.items()} == found
    assert max(sizes) > 3, "nodes share groups"
