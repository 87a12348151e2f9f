"""The KV format that the PD cluster serves with; members with another format are not used.

Engines are upgraded one after the other, and an upgraded engine may have another format. The old
format stays in use while a PD member serves with it, so that one upgraded node does not make the
others incompatible. The upgraded nodes are used once the last old node has left:

    format in use    1 1 1 1 1     1 1 1 1 1     1 1 1 1 2 ...   2
    formats          11111    ->   21111    ->   22221      ->   22222
    nodes in use     11111         .1111         ....1           22222

When no live PD member has the format any more, the format of the most live PD members is next. Pure
bookkeeping: `Membership` calls `update`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

import msgspec

from prfaas.config.gateway import GatewayTimeouts
from prfaas.gateway.fleet.member import Member
from prfaas.types import Compat

log = logging.getLogger(__name__)

# Counted of the time between two updates. A gateway that was paused has not observed the members.
_MOST_OBSERVED_S = 1.0


class FormatInUse:
    def __init__(self, timeouts: GatewayTimeouts) -> None:
        self.current: Compat | None = None  # None until a PD member is alive
        self._settling_s = timeouts.first_plan_s
        self._grace_s = max(0.0, timeouts.hung_s - timeouts.silent_s)
        self._first_s: float | None = None  # when the first PD member was alive
        self._settled = False
        self._updated_s = 0.0
        self._missing_s = 0.0  # how long other members were alive, and none with the format

    def update(self, members: Sequence[Member], now_s: float) -> None:
        """Judges the format by the PD members. Other members are not passed."""
        observed_s = min(max(0.0, now_s - self._updated_s), _MOST_OBSERVED_S)
        self._updated_s = now_s
        live = Counter(m.compat for m in members if m.compat is not None and m.is_alive(now_s))
        if not live:
            self._missing_s = 0.0  # the gateway's own network may be gone
            return
        if self._first_s is None:
            self._first_s = now_s
        self._settled = self._settled or now_s >= self._first_s + self._settling_s
        if not self._settled:
            # The members of a gateway that has just started answer one after the other.
            self._choose(live)
            self._settled = _all_listed_answer(members, now_s)
        elif self.current in live:
            self._missing_s = 0.0
        else:
            self._missing_s += observed_s
            if self._missing_s >= self._grace_s or not self._may_return(members):
                self._choose(live)

    def _may_return(self, members: Sequence[Member]) -> bool:
        """Whether a silent member has the format. A member that drains takes no new requests, and a
        member that was removed is not expected back."""
        return any(m.compat == self.current and not m.leaving for m in members)

    def _choose(self, live: Counter[Compat]) -> None:
        """The format of the most members. Of equals, the one in use, or else the first in the order
        of its fields, so that two gateways choose the same."""
        before = self.current
        order = sorted(live, key=lambda f: (-live[f], f != before, msgspec.structs.astuple(f)))
        self.current = order[0]
        self._missing_s = 0.0
        if before is not None and before != self.current:
            log.warning(
                "the KV format in use has changed: %s", "; ".join(before.differences(self.current))
            )


def _all_listed_answer(members: Sequence[Member], now_s: float) -> bool:
    listed = [m for m in members if m.listed]
    return bool(listed) and all(m.is_alive(now_s) for m in listed)
