"""The sets of members with equal KV formats, and the model that all of them serve.

A hand-off needs two engines with the same format (`types.Compat`). An engine may hand over in two
forms; the format of its first one counts here, and each hand-off uses the better form that both
engines have (`contracts/forms.py`). Engines are upgraded one after the other, and an upgraded
engine may have another format: another model revision, another memory layout. Members with equal
formats are a *set*. All sets of the model in use serve side by side, so that no member is shut out
because of another:

    formats    11111    ->   21111    ->   22111    ->  ...  ->   22222
    sets       {11111}       {2} {1111}    {22} {111}             {22222}

Two members are not used. A PrfaaS member without a PD member of its format has no node to send its
state to. A member of another model would answer requests of this one differently: the model in use
stays while a PD member serves it; when none does any more, that of the most live PD members is
next. Pure bookkeeping: `Membership` calls `update`. Everything here is computed from the members,
so that a member that reports one format after another leaves nothing behind.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence

from prfaas.config.gateway import GatewayTimeouts
from prfaas.gateway.fleet.member import Member
from prfaas.types import ClusterId, Compat, NodeId

log = logging.getLogger(__name__)

# Counted of the time between two updates. A gateway that was paused has not observed the members.
_MOST_OBSERVED_S = 1.0
# Prompts are hashed once for each block size. Sets with further sizes serve without prefix hits.
MOST_BLOCK_SIZES = 4
# Hashing takes as long as there are blocks. Smaller ones count where most members have them.
LEAST_BLOCK_TOKENS = 16

NO_PD_MEMBER = "no live PD node has its KV format"


class Formats:
    def __init__(self, timeouts: GatewayTimeouts, homes: Collection[ClusterId]) -> None:
        """`homes` are the PD clusters."""
        self.model: str | None = None  # in use; None until a PD member is alive
        self.block_sizes: frozenset[int] = frozenset()  # at which prompts are hashed
        self._homes = homes
        self._served: frozenset[Compat] = frozenset()  # formats of live PD members of the model
        self._settling_s = timeouts.first_plan_s
        self._grace_s = max(0.0, timeouts.hung_s - timeouts.silent_s)
        self._first_s: float | None = None  # when the first PD member was alive
        self._settled = False
        self._updated_s = 0.0
        self._missing_s = 0.0  # how long other members were alive, and none with the model

    def update(self, members: Sequence[Member], now_s: float) -> None:
        """Judges the model in use and its sets by the members' latest reports."""
        local = [m for m in members if m.cluster in self._homes]
        alive = [m for m in local if m.is_alive(now_s)]
        self._update_model(local, alive, now_s)
        self._served = frozenset(m.compat for m in alive if m.compat and m.model == self.model)
        self._update_block_sizes(members)

    def problem(self, member: Member) -> str | None:
        """Why no request may use this member; None when its format is no reason."""
        if self.model is None or member.compat is None:
            return None
        if member.model != self.model:
            return f"it serves {member.model}, and the deployment serves {self.model}"
        if member.compat not in self._served and member.cluster not in self._homes:
            return NO_PD_MEMBER
        return None

    def has_indexed_blocks(self, member: Member, compat: Compat | None = None) -> bool:
        """Whether prompts are compared with what this member has cached. `compat`: of one of its
        pools; None: of the first."""
        compat = compat or member.compat
        if compat is None or (self.model is not None and member.model != self.model):
            return False
        return compat.block_tokens in self.block_sizes

    # The model in use -----------------------------------------------------------------------------

    def _update_model(self, local: Sequence[Member], alive: Sequence[Member], now_s: float) -> None:
        observed_s = min(max(0.0, now_s - self._updated_s), _MOST_OBSERVED_S)
        self._updated_s = now_s
        live = Counter(m.model for m in alive if m.model is not None)
        listed = Counter(m.model for m in alive if m.model is not None and m.listed)
        if not live:
            self._missing_s = 0.0  # the gateway's own network may be gone
            return
        if self._first_s is None:
            self._first_s = now_s
        self._settled = self._settled or now_s >= self._first_s + self._settling_s
        if not self._settled:
            # The members of a gateway that has just started answer one after the other.
            self._choose(live, listed)
            self._settled = _all_listed_answer(local, now_s)
        elif self.model in live:
            self._missing_s = 0.0
        else:
            self._missing_s += observed_s
            if self._missing_s >= self._grace_s or not self._may_return(local):
                self._choose(live, listed)

    def _may_return(self, local: Sequence[Member]) -> bool:
        """Whether a silent member has the model. A member that drains takes no new requests, and a
        member that was removed is not expected back."""
        return any(m.model == self.model and not m.leaving for m in local)

    def _choose(self, live: Counter[str], listed: Counter[str]) -> None:
        """The model of the most members of the deployment file, and then of the most members that
        have registered: those may be many, and any holder of the member key can register. Of
        equals, the one in use, or else the first by name, so that two gateways choose the same."""
        before = self.model

        def order(model: str) -> tuple[int, int, bool, str]:
            return -listed[model], -live[model], model != before, model

        self.model = min(live, key=order)
        self._missing_s = 0.0
        if before is not None and before != self.model:
            log.warning("the model in use has changed from %s to %s", before, self.model)

    def _update_block_sizes(self, members: Sequence[Member]) -> None:
        """Every member has a first pool, and hand-offs of every pair can use it: the sizes of
        second pools do not take the place of these."""
        first, second = Counter[int](), Counter[int]()
        for member in members:
            report = member.report
            if report is None or report.pool is None:
                continue
            if self.model is None or member.model == self.model:
                first[report.pool.compat.block_tokens] += 1
                for pool in report.more_pools:
                    second[pool.compat.block_tokens] += 1
        sizes = set(first) | set(second)
        order = sorted(sizes, key=lambda size: (-first[size], -second[size], -size))
        kept = [size for size in order[1:] if size >= LEAST_BLOCK_TOKENS]
        self.block_sizes = frozenset([*order[:1], *kept[: MOST_BLOCK_SIZES - 1]])


def sets_of(members: Sequence[Member]) -> tuple[frozenset[NodeId], ...]:
    """The members' nodes by KV format. The largest set is first."""
    first = members[0].compat if members else None
    if all(member.compat == first for member in members):  # as a rule; the rest costs more
        nodes = frozenset(m.node for m in members if m.node is not None)
        return (nodes,) if nodes else ()
    by_format: dict[Compat, set[NodeId]] = {}
    for member in members:
        if member.compat is not None and member.node is not None:
            by_format.setdefault(member.compat, set()).add(member.node)
    return tuple(sorted(map(frozenset, by_format.values()), key=len, reverse=True))


def describe_mismatch(one: Member, other: Member) -> str:
    """Why two members have no format in common: what differs in each form that both have."""
    found = [
        f"{ours.form}: {difference}"
        for ours in one.compats
        for theirs in other.compats
        if ours.form == theirs.form
        for difference in ours.differences(theirs)
    ]
    if found:
        return ", ".join(found)
    forms = [" and ".join(c.form for c in member.compats) or "no form" for member in (one, other)]
    return f"{forms[0]} here, {forms[1]} there"


def _all_listed_answer(members: Sequence[Member], now_s: float) -> bool:
    listed = [m for m in members if m.listed]
    return bool(listed) and all(m.is_alive(now_s) for m in listed)
