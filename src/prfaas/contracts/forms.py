"""In which form two engines hand over. Pure.

An engine may have two forms (`types.Form`). Equal native formats are preferred, because nothing is
converted and whole blocks are copied; every other pair uses the canonical form. The gateway, and
`prfaas doctor pair`, choose it from the reports of both kvds. The kvd of the receiver checks the
choice when it makes the grant, which says in which form it takes the state.
"""

from __future__ import annotations

from collections.abc import Collection

from prfaas.contracts.kvd_api import KvdReport
from prfaas.types import CANONICAL, Compat


def compats_of(report: KvdReport | None) -> tuple[Compat, ...]:
    """The formats in which the engine of a kvd hands over."""
    return () if report is None else tuple(pool.compat for pool in report.pools)


def choose_compat(sender: Collection[Compat], receiver: Collection[Compat]) -> Compat | None:
    """The format in which a hand-off between the two travels; None when they have none in common.
    It does not depend on the direction."""
    common = [compat for compat in sender if compat in receiver]
    return min(common, key=lambda compat: compat.form == CANONICAL, default=None)
