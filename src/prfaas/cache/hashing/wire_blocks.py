"""An engine's blocks of one size, and the wire blocks whose tokens they contain.

An engine names its blocks by hashes of its own and cuts prompts into blocks of its own size. Nodes
exchange prefixes in wire blocks, whose size the cluster has agreed on. It may be larger or smaller
than the engine's, and neither needs to be a multiple of the other.

    engine blocks of 6   |     a     |     b     |     c     |
    wire blocks of 4     |   0   |   1   |   2   |   3   |         1 needs a and b, 2 needs b

A group holds a wire block when all its tokens lie in engine blocks that the group holds. The engine
block that contains the last token completes the wire block. Several engine blocks may do so: those
of prompts that differ only after the wire block's last token. One of them is enough. The engine
blocks that end inside the wire block are the same for all these prompts, and each is needed.

A *point* is the end of an engine block. A point inside a wire block records the groups that hold
every engine block from the wire block's first token up to the point (`runs`). The next points in
the same wire block, and the wire blocks that an engine block completes directly after the point,
depend on it (`below`). A point that no group holds stays while something depends on it, because the
engine may store its block again.

A linear state exists at the end of an engine block only. So a group of states holds a wire block
when it holds an engine block that ends where the wire block ends. The other tokens do not matter.

Groups are bits of a mask. Independent of vLLM's events and of sequence numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from prfaas.cache.hashing.chain import TOKEN_BYTES
from prfaas.types import BlockHash

if TYPE_CHECKING:
    from hashlib import _Hash

MOST_CHANGES = 1 << 20  # wire blocks that one payload may change: more than any prompt has

EngineHash: TypeAlias = int | bytes


class WireBlock:
    """`last` is the point inside this block after which engine blocks complete it. It is None when
    one engine block contains the whole wire block."""

    __slots__ = ("bits", "completing", "last", "more", "name", "users")

    def __init__(self, name: BlockHash, last: Point | None) -> None:
        self.name = name
        self.last = last
        self.users = 0  # points whose engine block completes this block
        self.completing = 0  # groups that hold such an engine block,
        self.more: dict[int, int] | None = None  # and how many beyond the first, where any
        self.bits = 0  # groups that hold every token


class Point:
    """The end of an engine block, and with it a prefix of a prompt."""

    __slots__ = ("before", "below", "bits", "end", "extra", "key", "name", "runs", "sha", "wires")

    def __init__(self, key: EngineHash, end: int, name: BlockHash, before: Point | None) -> None:
        self.key = key
        self.end = end  # tokens from the beginning of the prompt
        self.name = name  # of the last whole wire block up to here, or the prompt's seed
        self.before = before  # the previous point, when the same wire block contains it
        self.sha: _Hash | None = None  # of the tokens after the last whole wire block, if any,
        self.extra = b""  # and of what else their content depends on
        self.wires: tuple[WireBlock, ...] = ()  # that the engine block completes, in order
        self.bits = 0  # groups that hold the engine block
        self.runs = 0  # of a point at the end of a wire block: always 0
        self.below: dict[Point | WireBlock, None] | None = None  # None: nothing


Change: TypeAlias = tuple[BlockHash, int, int]  # a wire block, its groups before and after


class TooManyChanges(Exception):
    """More than `MOST_CHANGES`. Only a part of them was made, so the blocks are useless now."""


class WireBlocks:
    """A block that is named, and one that a group releases, stays known until the next `settle`. A
    block that a group holds stays known beyond it."""

    def __init__(self, engine_tokens: int, wire_tokens: int, states: int) -> None:
        """`states`: the groups whose blocks are linear states."""
        self.engine_tokens = engine_tokens
        self.wire_tokens = wire_tokens
        self._states = states
        self._points: dict[EngineHash, Point] = {}
        self._wires: dict[BlockHash, WireBlock] = {}
        self._recent: set[EngineHash] = set()  # named or released since the last `settle`

    def __len__(self) -> int:
        """Records in memory."""
        return len(self._points) + len(self._wires)

    def __iter__(self) -> Iterator[tuple[BlockHash, int]]:
        """Every wire block that a group holds, and the groups."""
        return ((wire.name, wire.bits) for wire in self._wires.values() if wire.bits)

    def groups_of(self, name: BlockHash) -> int:
        """The groups that hold the wire block."""
        wire = self._wires.get(name)
        return 0 if wire is None else wire.bits

    def _known(self, key: EngineHash) -> Point | None:
        point = self._points.get(key)
        return point if point is not None and (point.bits or key in self._recent) else None

    # Naming ---------------------------------------------------------------------------------------

    def name(
        self,
        keys: Sequence[EngineHash],
        data: bytes,
        extras: Sequence[bytes],
        origin: tuple[EngineHash | None, BlockHash],
        room: int,
    ) -> None:
        """Names engine blocks that follow a block, or begin a prompt when the block is None.
        `origin`: that block, and the seed of the prompt's chain. `data` has the tokens. Names none
        after an unknown block, and only as many as fit into `room` records."""
        parent, seed = origin
        previous: Point | None = None
        if parent is not None:
            previous = self._known(parent)
            if previous is None:
                return
        end = 0 if previous is None else previous.end
        step = self.engine_tokens * TOKEN_BYTES
        for position, key in enumerate(keys):
            end += self.engine_tokens
            point = self._points.get(key)
            if point is None:
                room -= 2 + self.engine_tokens // self.wire_tokens
                if room < 0:
                    return
                extra = extras[position] if position < len(extras) else b""
                piece = data[position * step : (position + 1) * step]
                point = self._new_point(key, previous, seed, piece, extra)
                if point is None:
                    return
            elif point.end != end:
                return  # two prefixes with the same engine hash
            self._recent.add(key)
            previous = point

    def _new_point(
        self, key: EngineHash, previous: Point | None, seed: BlockHash, data: bytes, extra: bytes
    ) -> Point | None:
        """None when the wire block is known with other engine hashes for the same tokens: two
        chains of points would then count as one."""
        size = self.wire_tokens
        if previous is None:
            position, digest, sha, extras = 0, seed, None, b""
        else:
            position, digest, sha, extras = (
                previous.end,
                previous.name,
                previous.sha,
                previous.extra,
            )
        start, end = position, position + self.engine_tokens
        wires: list[WireBlock] = []
        while position < end:
            begin = position - position % size
            stop = min(end, begin + size)
            piece = data[(position - start) * TOKEN_BYTES : (stop - start) * TOKEN_BYTES]
            if sha is None:
                sha = hashlib.sha256(digest + piece)
            else:
                sha = sha.copy()
                sha.update(piece)
            if extra:
                extras = self._with_extra(extras, start - begin, extra)
            if stop == begin + size:
                if extras:
                    sha.update(extras)
                digest = BlockHash(sha.digest())
                sha, extras = None, b""
                last = previous if begin < start else None
                wire = self._wires.get(digest)
                if wire is None:
                    wire = WireBlock(digest, last)
                elif wire.last is not last:
                    return None
                wires.append(wire)
            position = stop
        inside = previous is not None and end % size and previous.end > end - end % size
        point = Point(key, end, digest, previous if inside else None)
        point.sha, point.extra, point.wires = sha, extras, tuple(wires)
        self._add(point)
        return point

    @staticmethod
    def _with_extra(extras: bytes, offset: int, extra: bytes) -> bytes:
        """What the content of a wire block depends on beside its tokens: the extras of the engine
        blocks that it shares tokens with, and where these blocks begin."""
        return hashlib.sha256(extras + offset.to_bytes(8, "little", signed=True) + extra).digest()

    # Holding --------------------------------------------------------------------------------------

    def hold(self, key: EngineHash, group: int, changes: list[Change]) -> bool:
        """The group (one bit) holds the engine block. Appends the wire blocks whose groups changed.
        Returns False for an unknown block. Raises TooManyChanges."""
        point = self._known(key)
        if point is None:
            return False
        if not point.bits & group:
            point.bits |= group
            self._spread(point, group, True, changes)
        return True

    def release(self, key: EngineHash, group: int, changes: list[Change]) -> None:
        """The group does not hold the engine block any more. Raises TooManyChanges."""
        point = self._points.get(key)
        if point is not None and point.bits & group:
            point.bits &= ~group
            self._recent.add(key)
            self._spread(point, group, False, changes)

    def clear(self) -> None:
        """No group holds anything. What was held stays known until the next `settle`."""
        for key, point in self._points.items():
            if point.bits:
                self._recent.add(key)
            point.bits = point.runs = 0
        for wire in self._wires.values():
            wire.bits = wire.completing = 0
            wire.more = None

    def settle(self) -> None:
        """Forgets the recent blocks that no group holds and nothing depends on."""
        recent, self._recent = self._recent, set()
        for key in recent:
            point = self._points.get(key)
            if point is not None:
                self._forget_unused(point)

    def _spread(self, point: Point, group: int, held: bool, changes: list[Change]) -> None:
        inside = point.sha is not None
        if group & self._states:
            if not inside:
                self._count(point.wires[-1], group, held, changes)
            return
        for wire in point.wires:
            self._count(wire, group, held, changes)
        if inside:
            self._run(point, changes)

    def _run(self, point: Point, changes: list[Change]) -> None:
        stale = [point]
        while stale:
            point = stale.pop()
            runs = point.bits & ~self._states
            if point.before is not None:
                runs &= point.before.runs
            if runs == point.runs:
                continue
            point.runs = runs
            for dependent in point.below or ():
                if isinstance(dependent, WireBlock):
                    self._update(dependent, changes)
                else:
                    stale.append(dependent)

    def _count(self, wire: WireBlock, group: int, held: bool, changes: list[Change]) -> None:
        """One engine block more, or one less, completes the wire block for the group."""
        more = wire.more
        if held and wire.completing & group:
            if more is None:
                more = wire.more = {}
            more[group] = more.get(group, 0) + 1
        elif not held and more is not None and group in more:
            more[group] -= 1
            if not more[group]:
                del more[group]
        else:
            wire.completing ^= group
            self._update(wire, changes)

    def _update(self, wire: WireBlock, changes: list[Change]) -> None:
        bits = wire.completing
        if wire.last is not None:
            bits &= wire.last.runs | self._states
        if bits != wire.bits:
            if len(changes) >= MOST_CHANGES:
                raise TooManyChanges
            changes.append((wire.name, wire.bits, bits))
            wire.bits = bits

    # Records --------------------------------------------------------------------------------------

    def _add(self, point: Point) -> None:
        self._points[point.key] = point
        if point.before is not None:
            _depend(point, point.before)
        for wire in point.wires:
            wire.users += 1
            if wire.users == 1:
                self._wires[wire.name] = wire
                if wire.last is not None:
                    _depend(wire, wire.last)

    def _forget_unused(self, point: Point) -> None:
        unused = [point]
        while unused:
            point = unused.pop()
            if point.bits or point.below or point.key not in self._points:
                continue
            del self._points[point.key]
            if point.before is not None:
                _depend_no_more(point, point.before)
                unused.append(point.before)
            for wire in point.wires:
                wire.users -= 1
                if not wire.users:
                    del self._wires[wire.name]
                    if wire.last is not None:
                        _depend_no_more(wire, wire.last)
                        unused.append(wire.last)

    def check(self) -> None:
        """Asserts every invariant. Call it after `settle` only."""
        assert not self._recent
        users: dict[BlockHash, list[Point]] = {name: [] for name in self._wires}
        for key, point in self._points.items():
            assert point.key == key and (point.bits or point.below), "nothing needs this point"
            inside = point.end % self.wire_tokens != 0
            assert inside == (point.sha is not None)
            runs = point.bits & ~self._states if inside else 0
            assert point.runs == runs & (-1 if point.before is None else point.before.runs)
            assert all(
                dependent.before is point
                if isinstance(dependent, Point)
                else dependent.last is point
                for dependent in point.below or ()
            )
            assert point.before is None or point in (point.before.below or ())
            for wire in point.wires:
                assert self._wires[wire.name] is wire
                users[wire.name].append(point)
        for name, wire in self._wires.items():
            assert wire.users == len(users[name]) > 0, "a wire block that no point completes"
            assert wire.last is None or wire in (wire.last.below or ())
            completing = 0
            for point in users[name]:
                ends = point.wires[-1] is wire and point.end % self.wire_tokens == 0
                completing |= point.bits if ends else point.bits & ~self._states
            assert wire.completing == completing, "the groups that complete it are stale"
            runs = -1 if wire.last is None else wire.last.runs | self._states
            assert wire.bits == completing & runs, "the groups that hold it are stale"


def _depend(dependent: Point | WireBlock, on: Point) -> None:
    if on.below is None:
        on.below = {}
    on.below[dependent] = None


def _depend_no_more(dependent: Point | WireBlock, on: Point) -> None:
    assert on.below is not None
    del on.below[dependent]
    if not on.below:
        on.below = None
