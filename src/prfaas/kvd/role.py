"""The role that the planner has assigned to this host: recorded here, read by every gateway.

A change names the epoch that it was decided on. When two planners disagree, the change of the one
that read the older role is refused, and it reads again. Where gateways elect the one that plans, a
change of a gateway whose planning lease has passed to another one is refused as well. The role is
advice: a node accepts both kinds of work.
"""

from __future__ import annotations

from prfaas.contracts.kvd_api import Role, SetRole


def compare_and_set(current: Role, requested: SetRole, promised_epoch: int = 0) -> Role | None:
    """The new role, with the next epoch, when `requested` names the current epoch; else None.
    `promised_epoch` is that of the planning lease; a change of an earlier one is refused, too."""
    if requested.epoch != current.epoch:
        return None
    if 0 < requested.planning_epoch < promised_epoch:
        return None
    return Role(requested.role, current.epoch + 1)
