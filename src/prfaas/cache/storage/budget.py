"""The memory that the pools of a kvd share. Pure.

A kvd has one pool for each form in which its engines hand over, and one amount of memory for all of
them. A pool takes memory page by page and never gives it back: a page that was used once stays
allocated, because engines have it mapped and a GPU may have it registered. Each member is
guaranteed an eighth of the memory, from when it joins: the others cannot grow into that.
"""

from __future__ import annotations

GUARANTEED_PARTS = 8  # the guarantee of each member is this part of the memory


class MemoryBudget:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.guaranteed_bytes = nbytes // GUARANTEED_PARTS
        self.claimed_bytes = 0  # of all members: what each has taken, or its guarantee if larger

    def join(self, page_bytes: int) -> BudgetShare | None:
        """The share of a new member, which takes memory in pages of this size. None when the other
        members have left less than the guarantee, or less than one page."""
        if self.nbytes - self.claimed_bytes < max(page_bytes, self.guaranteed_bytes):
            return None
        return BudgetShare(self, page_bytes)


class BudgetShare:
    """The memory of one member. Made by `MemoryBudget.join`."""

    def __init__(self, budget: MemoryBudget, page_bytes: int) -> None:
        self.page_bytes = page_bytes
        self.taken_pages = 0
        self._budget = budget
        self._claimed_bytes = budget.guaranteed_bytes
        budget.claimed_bytes += self._claimed_bytes

    @property
    def limit_pages(self) -> int:
        """How many pages the member may have now. It falls when other members grow, but never
        below the pages that this one has taken, and below its guarantee."""
        budget = self._budget
        return (budget.nbytes - budget.claimed_bytes + self._claimed_bytes) // self.page_bytes

    def take(self, pages: int) -> None:
        """The member uses that many further pages for the first time."""
        assert self.taken_pages + pages <= self.limit_pages, "more pages than the budget has"
        self.taken_pages += pages
        more = self.taken_pages * self.page_bytes - self._claimed_bytes
        if more > 0:
            self._claimed_bytes += more
            self._budget.claimed_bytes += more

    def leave(self) -> None:
        """The member does not exist any more, and neither does its memory."""
        self._budget.claimed_bytes -= self._claimed_bytes
        self._claimed_bytes = 0
