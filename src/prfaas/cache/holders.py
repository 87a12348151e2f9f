"""Which lanes hold which block: block hash -> bit mask, one bit per lane.

    masks[hash] = ...0110       bit = lane = (node, group)
                      ││
                      │└ lane 1: node a, full0
                      └─ lane 2: node a, linear0

A retired lane stops counting at once; `sweep` clears its bits later, in small steps, and only then
can another node get the lane. Independent of nodes, groups and block sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_SHARED_MASKS = 1 << 16


class Stretch(NamedTuple):
    """Consecutive blocks with the same holders."""

    first: int
    mask: int


class BlockHolders:
    def __init__(self) -> None:
        self._holders: dict[bytes, int] = {}
        self._masks: dict[int, int] = {}  # equal masks share one object: 32 bytes a block saved
        self._live = 0  # lanes whose bits count
        self._retired = 0  # lanes given up whose bits may still be set
        self._to_sweep: list[bytes] = []
        self._sweeping = 0

    def __len__(self) -> int:
        """Distinct blocks with an entry. Blocks of retired lanes count until `sweep` drops them."""
        return len(self._holders)

    def new_lanes(self, count: int) -> list[int]:
        """Adjacent lanes, so that shifts of a mask bring the lanes of one owner together."""
        starts = free = ~(self._live | self._retired)
        for more in range(1, count):
            starts &= free >> more
        first = starts & -starts
        lanes = [first << place for place in range(count)]
        self._live |= sum(lanes)
        return lanes

    def retire(self, lanes: int) -> None:
        """Gives up every lane of the mask. Costs nothing: see `sweep`."""
        self._live &= ~lanes
        self._retired |= lanes
        if not self._live and not self._sweeping:
            self._holders.clear()
            self._retired = 0

    def store(self, hashes: Iterable[bytes], lane: int) -> None:
        holders, masks = self._holders, self._masks
        if len(masks) > MAX_SHARED_MASKS:
            masks.clear()  # only sharing is lost
        get, share = holders.get, masks.setdefault
        for name in hashes:
            mask = get(name, 0) | lane
            holders[name] = share(mask, mask)

    def remove(self, hashes: Iterable[bytes], lane: int) -> None:
        if len(self._masks) > MAX_SHARED_MASKS:
            self._masks.clear()
        for name in hashes:
            self._set(name, self._holders.get(name, 0) & ~lane)

    def stretches(
        self, chain: Sequence[bytes], full_mask: int, runs_decide: bool
    ) -> tuple[list[Stretch], int]:
        """The prompt, cut where the holders change, and the number of blocks that were read.

        With `runs_decide` the walk stops at the block where the last lane of `full_mask` ends.
        Equal masks are nearly always the same object, so comparing identities finds the cuts: a
        block costs one look-up and one comparison.
        """
        alive = full_mask
        stretches: list[Stretch] = []
        get = self._holders.get
        last: object = stretches  # no mask yet
        for block, mask in enumerate(map(get, chain)):
            if mask is last:
                continue
            last = mask
            stretches.append(Stretch(block, mask or 0))
            alive &= mask or 0
            if not alive and runs_decide:
                return stretches, block
        return stretches, len(chain)

    def sweep(self, max_blocks: int) -> int:
        """Clears bits of retired lanes in up to `max_blocks` entries and returns how many entries
        it visited; 0 means that no retired lane is left. Matches never see those bits: they only
        hold memory."""
        if not self._to_sweep:
            if not self._retired:
                return 0
            self._sweeping = self._retired
            self._to_sweep = list(self._holders)
        batch = self._to_sweep[-max_blocks:]
        del self._to_sweep[-max_blocks:]
        keep = ~self._sweeping
        for name in batch:
            self._set(name, self._holders.get(name, 0) & keep)
        if not self._to_sweep:
            self._retired &= keep
            self._sweeping = 0
        return len(batch)

    def check(self, lanes: Sequence[int]) -> None:
        """Asserts that `lanes` are exactly the live ones, and that no entry has another bit."""
        assert sum(lanes) == self._live, "two lanes share a bit, or a live lane has no owner"
        assert all(lane & (lane - 1) == 0 for lane in lanes), "a lane is one bit"
        assert not self._live & self._retired
        for name, mask in self._holders.items():
            assert mask and not mask & ~(self._live | self._retired), f"{name.hex()}: {mask:b}"
        if not self._retired:
            assert not self._to_sweep

    def _set(self, name: bytes, mask: int) -> None:
        if mask:
            self._holders[name] = self._masks.setdefault(mask, mask)
        else:
            self._holders.pop(name, None)
