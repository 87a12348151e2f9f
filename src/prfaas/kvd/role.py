"""Which work the planner has assigned to this host: recorded here, read by every gateway.

A change names the epoch it was decided on. Of two planners that disagree, the one that saw the
older role loses and looks again. Advice, not a rule: a node takes either work.
"""

from __future__ import annotations

from prfaas.contracts.kvd_api import Role


def compare_and_set(current: Role, asked: Role) -> Role | None:
    """The new role, one epoch on, when `asked` names the current epoch; None when it does not."""
    if asked.epoch != current.epoch:
        return None
    return Role(asked.role, current.epoch + 1)
