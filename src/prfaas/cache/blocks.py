"""What a pool keeps: blocks, the prefixes that name them, and the order in which idle ones go. Data
and one interface; the pages are the block pool's, the hashes the tree's, the shares the tenants'.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from prfaas.types import BlockHash

if TYPE_CHECKING:
    from prfaas.cache.storage.ssd import Slot

COMMON = ""  # the tenant of blocks that come without a tag


class Block:
    """One unit. `node` is set while the unit is a prefix block, `slot` while its bytes are on SSD
    (the unit then has pages only while it is being written there or read back). `filled_from`
    counts the leading tokens that the block lacks: a window's oldest block may lack those before
    the window."""

    __slots__ = ("filled_from", "group", "node", "pages", "refs", "slot", "tenant")

    def __init__(self, group: int, pages: tuple[int, ...], tenant: str = COMMON) -> None:
        self.group = group
        self.tenant = tenant  # changes only while the block has no pages
        self.pages = pages
        self.refs = 0
        self.filled_from = 0
        self.node: PrefixNode | None = None
        self.slot: Slot | None = None

    def __repr__(self) -> str:
        where = f"{len(self.pages)} pages" if self.slot is None else "ssd"
        return f"Block(group {self.group}, {where}, refs {self.refs}, node {self.node})"


class PrefixNode:
    """The prefix of `depth` blocks that ends with the block named `hash`."""

    __slots__ = (
        "answer",
        "blocks",
        "children",
        "depth",
        "hash",
        "hits",
        "last_used_s",
        "parent",
        "resident_answers",
        "resident_blocks",
        "resident_children",
        "spare",
    )

    def __init__(self, name: BlockHash, parent: PrefixNode | None, groups: int) -> None:
        self.hash = name
        self.parent = parent
        self.depth: int = 1 if parent is None else parent.depth + 1
        self.blocks: list[Block | None] = [None] * groups
        self.children = 0
        self.resident_blocks = 0  # of this node, in memory
        self.resident_children = 0  # children with anything in memory at or below them
        self.resident_answers = 0  # those of them that are parts of answers
        self.last_used_s = 0.0
        self.hits = 0  # times a prompt resumed exactly here
        self.spare = False  # its checkpoint was taken speculatively
        self.answer = False  # a part of an answer, which no prompt has contained yet

    @property
    def resident(self) -> bool:
        return self.resident_blocks > 0 or self.resident_children > 0

    def __repr__(self) -> str:
        return f"Node({self.hash.hex()[:8]}, depth {self.depth})"


class Eviction(Protocol):
    """Orders the idle blocks of one tenant. The block pool reports every change and asks which
    blocks to evict."""

    def another(self) -> Eviction:
        """The same policy, for the blocks of another tenant."""

    def __len__(self) -> int:
        """How many blocks are idle."""

    def idle(self, blocks: Sequence[Block], now: float) -> None:
        """No lease uses these blocks any more. They are in prompt order, first block first."""

    def busy(self, block: Block) -> None:
        """The block is in use again, or evicted."""

    def victims(self, now: float) -> Sequence[Block]:
        """The idle blocks to evict next, at least one while any is idle."""

    def admits(self, new_tokens: int, cached_tokens: int, nbytes: int, now: float) -> bool:
        """Whether an answer is worth more than the next victims: it takes `nbytes`, and saves the
        prefill of `new_tokens` after `cached_tokens`, which the pool has without it."""

    def check(self) -> None:
        """Asserts the policy's invariants."""
