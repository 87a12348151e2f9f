"""How the tenants of a deployment share the slots of one engine's decode batch. Pure.

An engine follows the rule with the sequences that it decodes, and a gateway with those that it has
sent there, so that both agree on who waits where. A tenant may take a slot while more slots are
free than it holds, and in any case while more than `kept_free` are free:

    16 slots, 4 kept free     one tenant alone takes 12     beside it, others take 2, 1 and 1

So a tenant that asks for everything leaves slots to tenants that come later, and the less a tenant
holds, the further it may go into what is kept free. No sequence is interrupted: what is not kept
free is free again only when a sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterable

KEPT_FREE = 4  # slots that one tenant leaves to the others


def kept_free(slots: int) -> int:
    """At most a quarter of few slots, but one of them wherever there are two."""
    return min(KEPT_FREE, max(slots // 4, min(1, slots // 2)))


def has_slot(held: int, own: int, slots: int) -> bool:
    """Whether a tenant that holds `own` slots may take another one, where `held` slots of `slots`
    are taken, its own included."""
    return slots - held > min(own, kept_free(slots))


def held_slots(wanted: Iterable[int], slots: int, others: int = 0) -> int:
    """The most slots that are held where tenants have so many sequences each beside `others`. The
    tenants with most sequences take theirs first: then fewest are left."""
    free = max(0, slots - others)
    for sequences in sorted(wanted, reverse=True):
        # A tenant that finds so many free stops at `kept_free`, or when it holds as many as are
        # left.
        free -= min(sequences, max(free - kept_free(slots), (free + 1) // 2))
    return slots - free
