"""The index against sets: events late, twice, lost, mixed; nodes that come, go and restart."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from prfaas.cache.groups import rules_for
from prfaas.cache.hashing import PromptHashes
from prfaas.cache.index import NodeInfo, PrefixIndex
from prfaas.types import BlockHash, ClusterId, HashEvent, NodeId
from tests.cache.builders import BLOCK, SEEDED, SPECS

# Two block sizes, three kinds of model.
INFOS = [
    NodeInfo(NodeId("a"), ClusterId("x"), BLOCK, rules_for(SPECS["hybrid"])),
    NodeInfo(NodeId("b"), ClusterId("x"), BLOCK, rules_for(SPECS["all"])),
    NodeInfo(NodeId("c"), ClusterId("y"), 2 * BLOCK, rules_for(SPECS["hybrid"])),
    NodeInfo(NodeId("d"), ClusterId("y"), BLOCK, rules_for(SPECS["linear"])),
]
PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=5).map(
    lambda blocks: PromptHashes([block for block in blocks for _ in range(BLOCK)])
)


class Sender:
    """A node: what it holds, what it has said, and what is still on its way."""

    def __init__(self, info: NodeInfo) -> None:
        self.info = info
        self.held: dict[str, set[BlockHash]] = {rule_.name: set() for rule_ in info.rules}
        self.log: list[HashEvent] = []
        self.on_the_way: list[HashEvent] = []

    def hit_tokens(self, prompt: PromptHashes) -> tuple[int, int]:
        """By trying every length: the hit, and the attention run."""
        hashes, size = prompt.at(self.info.block_tokens), self.info.block_tokens

        def serves(length: int, closing: bool) -> bool:
            return all(
                hashes[block] in self.held[rule_.name]
                for rule_ in self.info.rules
                if closing or not rule_.closes
                for block in rule_.needs(length, size)
            )

        lengths = range(len(hashes) + 1)
        hit = max(length for length in lengths if serves(length, True))
        if all(rule_.closes for rule_ in self.info.rules):
            return hit * size, hit * size
        return hit * size, max(length for length in lengths if serves(length, False)) * size


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.senders: dict[NodeId, Sender] = {}

    def draw_sender(self, data: st.DataObject) -> Sender:
        return self.senders[data.draw(st.sampled_from(sorted(self.senders)))]

    @rule(info=st.sampled_from(INFOS))
    def join_or_restart(self, info: NodeInfo) -> None:
        self.index.join(info)
        self.senders[info.node] = Sender(info)

    @precondition(lambda self: len(self.senders) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        sender = self.draw_sender(data)
        del self.senders[sender.info.node]
        self.index.leave(sender.info.node)
        for event in sender.log:
            assert not self.index.apply(event)

    def say(
        self, sender: Sender, group: str, hashes: list[BlockHash], store: bool, arrives: bool
    ) -> None:
        if store:
            sender.held[group] |= set(hashes)
        else:
            sender.held[group] -= set(hashes)
        event = HashEvent(
            len(sender.log),
            sender.info.node,
            group,
            sender.info.block_tokens,
            tuple(hashes),
            "stored" if store else "removed",
        )
        sender.log.append(event)
        if arrives:
            self.index.apply(event)
        else:
            sender.on_the_way.append(event)

    @precondition(lambda self: self.senders)
    @rule(data=st.data(), prompt=PROMPTS)
    def store_prompt(self, data: st.DataObject, prompt: PromptHashes) -> None:
        sender = self.draw_sender(data)
        chain = prompt.at(sender.info.block_tokens)
        for rule_ in sender.info.rules:
            hashes = chain[-1:] if rule_.kind == "linear" else chain
            self.say(sender, rule_.name, hashes, store=True, arrives=True)
        self.compare(prompt)

    @precondition(lambda self: self.senders)
    @rule(data=st.data(), prompt=PROMPTS, store=st.booleans(), arrives=st.booleans())
    def change(self, data: st.DataObject, prompt: PromptHashes, store: bool, arrives: bool) -> None:
        sender = self.draw_sender(data)
        group = data.draw(st.sampled_from([rule_.name for rule_ in sender.info.rules]))
        chain = prompt.at(sender.info.block_tokens)
        cut = data.draw(st.integers(0, len(chain)))
        hashes = chain[cut:] if data.draw(st.booleans()) else chain[:cut]
        self.say(sender, group, hashes, store, arrives)
        self.compare(prompt)

    @precondition(lambda self: any(s.on_the_way for s in self.senders.values()))
    @rule(data=st.data(), twice=st.booleans(), lost=st.booleans())
    def late_arrival(self, data: st.DataObject, twice: bool, lost: bool) -> None:
        sender = data.draw(st.sampled_from([s for s in self.senders.values() if s.on_the_way]))
        event = sender.on_the_way.pop(data.draw(st.integers(0, len(sender.on_the_way) - 1)))
        if not lost:
            for _ in range(1 + twice):
                self.index.apply(event)

    @precondition(lambda self: self.senders)
    @rule(data=st.data(), prompt=PROMPTS, by_replay=st.booleans())
    def resync(self, data: st.DataObject, prompt: PromptHashes, by_replay: bool) -> None:
        sender = self.draw_sender(data)
        if by_replay:
            for event in sender.log:
                self.index.apply(event)
        else:
            assert self.index.snapshot(sender.info.node, sender.held, len(sender.log))
        sender.on_the_way.clear()
        self.compare(prompt)
        assert self.index._members[sender.info.node].next_seq == len(sender.log)

    @rule(blocks=st.integers(1, 50))
    def sweep(self, blocks: int) -> None:
        self.index.sweep(blocks)

    def compare(self, prompt: PromptHashes) -> None:
        found = self.index.match({size: prompt.at(size) for size in self.index.block_sizes()})
        assert set(found) <= set(self.senders)
        for node, sender in self.senders.items():
            in_step = self.index._members[node].next_seq == len(sender.log)
            match = found.get(node)
            got = (match.tokens, match.attention_tokens) if match else (0, 0)
            if in_step:
                assert got == sender.hit_tokens(prompt), node

    @rule(prompt=PROMPTS)
    def ask(self, prompt: PromptHashes) -> None:
        self.compare(prompt)

    @invariant()
    def consistent(self) -> None:
        self.index.check()


IndexMachine.TestCase.settings = settings(SEEDED, max_examples=60, stateful_step_count=60)
TestIndex = IndexMachine.TestCase


@pytest.mark.grid
class TestIndexLonger(IndexMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(SEEDED, max_examples=150, stateful_step_count=60)
