"""The reading side of a pool: what a prompt finds in the prefix tree. Changes nothing.

A lookup answers three questions about a prompt's block hashes: which prefix nodes exist, how long
the hit is, and which blocks a lease on that hit has to pin. `resident` restricts the answers to
blocks in memory; otherwise those on SSD count as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from prfaas.cache.blocks import Block, PrefixNode
from prfaas.cache.groups import GroupRule, Hit, hybrid_hit
from prfaas.cache.lease import AnswerBasis, Match
from prfaas.cache.tree import PrefixTree
from prfaas.cache.units import UnitKey, closing_units
from prfaas.types import BlockHash


class PrefixLookup:
    def __init__(self, rules: Sequence[GroupRule], block_tokens: int, tree: PrefixTree) -> None:
        self._rules = rules
        self._block_tokens = block_tokens
        self._tree = tree
        self._has_full = any(not rule.closes for rule in rules)

    def nodes(self, hashes: Sequence[BlockHash]) -> list[PrefixNode | None]:
        """The node of each block, as far as a hit can reach."""
        nodes: list[PrefixNode | None] = []
        for name in hashes:
            node = self._tree.get(name)
            if node is None and self._has_full:
                break  # no attention run gets past it
            nodes.append(node)
        return nodes

    def hit(self, nodes: Sequence[PrefixNode | None], *, resident: bool) -> Hit:
        def has(group: int, block: int, unneeded: int) -> bool:
            node = nodes[block]
            held = node.blocks[group] if node is not None else None
            if held is None or (resident and held.slot is not None):
                return False
            return held.filled_from <= unneeded

        return hybrid_hit(self._rules, has, len(nodes), self._block_tokens)

    def match(self, hit: Hit) -> Match:
        """Converts a hit from blocks to tokens."""
        return Match(hit.blocks * self._block_tokens, hit.attention * self._block_tokens)

    def runs(self, nodes: Sequence[PrefixNode | None], *, resident: bool) -> dict[int, int]:
        """Per full-attention group, the blocks it holds from the start without a hole."""
        runs: dict[int, int] = {}
        for group, rule in enumerate(self._rules):
            if not rule.closes:
                run = 0
                while run < len(nodes) and (node := nodes[run]):
                    held = node.blocks[group]
                    if held is None or (resident and held.slot is not None):
                        break
                    run += 1
                runs[group] = run
        return runs

    def holds(self, hashes: Sequence[BlockHash], basis: AnswerBasis) -> bool:
        """Whether what an answer counts on still exists, on either tier."""
        nodes = self.nodes(hashes)
        runs = self.runs(nodes, resident=False)
        if any(runs[group] < run for group, run in basis.runs.items()):
            return False
        return not basis.complete or self.hit(nodes, resident=False).blocks == len(hashes)

    def equal_runs(self, blocks: int) -> dict[int, int]:
        """Runs of the same length for every full-attention group."""
        return {group: blocks for group, rule in enumerate(self._rules) if not rule.closes}

    def blocks_to_pin(
        self, nodes: Sequence[PrefixNode | None], hit: Hit, runs: dict[int, int]
    ) -> dict[UnitKey, Block]:
        """The runs, and the closing groups' units at the hit."""
        keys = [(group, block) for group, run in runs.items() for block in range(run)]
        if hit.blocks:
            length = hit.blocks * self._block_tokens
            keys += (unit.key for unit in closing_units(self._rules, self._block_tokens, length))
        found: dict[UnitKey, Block] = {}
        for key in keys:
            node = nodes[self.block_number(key)]
            block = node.blocks[key[0]] if node is not None else None
            assert block is not None, f"matched but not held: {key}"
            found[key] = block
        return found

    def block_number(self, key: UnitKey) -> int:
        """The block of the prompt at whose end a whole unit is filed."""
        group, where = key
        return where // self._block_tokens - 1 if self._rules[group].kind == "linear" else where
