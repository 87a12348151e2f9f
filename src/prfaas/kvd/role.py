"""The role that the planner has assigned to this host: recorded here, read by every gateway.

A change names the epoch that it was decided on. When two planners disagree, the change of the one
that read the older role is refused, and it reads again. The role is advice: a node accepts both
kinds of work.
"""

from __future__ import annotations

from prfaas.contracts.kvd_api import Role, SetRole


def compare_and_set(current: Role, requested: SetRole) -> Role | None:
    """The new role, with the next epoch, when `requested` names the current epoch; else None."""
    if requested.epoch != current.epoch:
        return None
    return Role(requested.role, current.epoch + 1)
