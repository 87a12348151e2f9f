"""Measurements taken during a run: columns about requests, busy time, queues, offered work.

Columns are arrays of doubles: a million requests fit in a hundred megabytes.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from prfaas.scheduler.request import Route
from prfaas.scheduler.view import LinkId
from prfaas.sim.arrivals import Arrivals
from prfaas.sim.results.result import Requests, RoleUse, Series, StageBacklog
from prfaas.types import ClusterId

WARM_UP = 0.1  # share of the requests that arrive before the measured window


class RequestColumns:
    """One row per arrival. A time is NaN until its event happens."""

    def __init__(self, arrivals: Arrivals, clusters: Iterable[str]) -> None:
        """`clusters`: the PD clusters, in the order of `arrivals.homes`, then the others."""
        self._arrivals = arrivals
        self._numbers = {name: number for number, name in enumerate(clusters)}
        count = len(arrivals)
        never = array("d", [float("nan")]) * count
        zero = array("d", bytes(8 * count))
        self.first_token_s, self.last_token_s = never[:], never[:]
        self.wait_s, self.prefill_s, self.transfer_s = never[:], never[:], never[:]
        self.slot_wait_s = zero[:]
        self.hit_tokens, self.retries = zero[:], zero[:]
        self.offloaded = bytearray(count)
        self._prefill_cluster = array("h", [-1]) * count
        self._decode_cluster = array("h", [-1]) * count

    def record_route(self, index: int, route: Route) -> None:
        self.offloaded[index] = route.offloaded
        self._prefill_cluster[index] = self._numbers[route.cluster]
        self._decode_cluster[index] = self._numbers[route.decode_cluster]

    def requests(self) -> Requests:
        homes = self._arrivals.homes
        return Requests(
            arrival_s=self._arrivals.at_s,
            first_token_s=np.array(self.first_token_s),
            last_token_s=np.array(self.last_token_s),
            wait_s=np.array(self.wait_s),
            prefill_s=np.array(self.prefill_s),
            transfer_s=np.array(self.transfer_s),
            slot_wait_s=np.array(self.slot_wait_s),
            prompt_tokens=self._arrivals.prompt_tokens,
            output_tokens=self._arrivals.output_tokens,
            hit_tokens=np.array(self.hit_tokens).astype(np.int64),
            offloaded=np.frombuffer(bytes(self.offloaded), dtype=np.bool_),
            retries=np.array(self.retries).astype(np.int64),
            home=np.zeros(len(self.retries), dtype=np.int64) if homes is None else homes,
            prefill_cluster=np.array(self._prefill_cluster).astype(np.int64),
            decode_cluster=np.array(self._decode_cluster).astype(np.int64),
        )


class StageNames:
    """Names of stages. With one PD cluster they are as short as in the paper."""

    def __init__(self, homes: Sequence[ClusterId], links: Iterable[LinkId]) -> None:
        only = len(homes) == 1
        self.prefill: dict[ClusterId, str] = {h: "pd_p" if only else f"pd_p {h}" for h in homes}
        self.decode: dict[ClusterId, str] = {h: "pd_d" if only else f"pd_d {h}" for h in homes}
        self.link: dict[LinkId, str] = {
            (source, target): f"link {source}" if only else f"link {source} {target}"
            for source, target in links
        }
        self.roles: dict[str, str] = {}  # stage -> role
        for home in homes:
            self.roles[self.prefill[home]] = "prefill" if only else f"{home} prefill"
            self.roles[self.decode[home]] = "decode" if only else f"{home} decode"

    def prefill_of(self, route: Route) -> str:
        return route.cluster if route.offloaded else self.prefill[route.cluster]


class StageMeter:
    """Offered work, busy time and capacity, per stage and per role."""

    def __init__(self, arrivals: Arrivals, names: StageNames) -> None:
        self.names = names
        at = arrivals.at_s
        self.start_s = float(at[int(len(at) * WARM_UP)])
        self.stop_s = float(at[-1])
        self._offered: dict[str, float] = {}
        self._busy: dict[str, float] = {}
        self._capacity: dict[str, float] = {}
        self._rate: dict[str, float] = {}
        self._since: dict[str, float] = {}

    def offer(self, stage: str, work: float, now_s: float) -> None:
        """Counts work that arrives at a stage, in the unit of its capacity times seconds."""
        if now_s >= self.start_s:
            self._offered[stage] = self._offered.get(stage, 0.0) + work

    def offer_request(self, route: Route, hold_s: float, now_s: float) -> None:
        """Counts a dispatched request at every stage it passes. `hold_s`: the expected time that it
        takes a decode slot."""
        names = self.names
        if not route.alone:
            self.offer(names.prefill_of(route), route.prefill_s, now_s)
        self.offer(names.decode[route.decode_cluster], hold_s, now_s)
        if route.offloaded:
            link = names.link[route.cluster, route.decode_cluster]
            self.offer(link, route.nbytes * 8, now_s)

    def use(self, stage: str, start_s: float, stop_s: float) -> None:
        """Counts busy time of one server of a stage, as far as it lies in the measured window."""
        if stop_s > self.stop_s:
            stop_s = self.stop_s
        if start_s < self.start_s:
            start_s = self.start_s
        if stop_s > start_s:
            self._busy[stage] = self._busy.get(stage, 0.0) + stop_s - start_s

    def set_capacity(self, stage: str, rate: float, now_s: float) -> None:
        """From now on the stage does `rate` units of work per second."""
        self._settle(stage, now_s)
        self._rate[stage] = rate

    def stages(self) -> tuple[StageBacklog, ...]:
        return tuple(
            StageBacklog(stage, _ratio(self._offered.get(stage, 0.0), capacity) - 1.0)
            for stage, capacity in self._capacities().items()
        )

    def roles(self, names: Mapping[str, str]) -> tuple[RoleUse, ...]:
        """The utilisation of each role. `names`: stage -> role."""
        capacities = self._capacities()
        return tuple(
            RoleUse(role, _ratio(self._busy.get(stage, 0.0), capacities[stage]))
            for stage, role in names.items()
            if stage in capacities
        )

    def _capacities(self) -> dict[str, float]:
        for stage in self._rate:
            self._settle(stage, self.stop_s)
        # A stage that never had a server and was offered nothing is left out.
        return {
            stage: capacity
            for stage, capacity in self._capacity.items()
            if capacity > 0 or self._offered.get(stage, 0.0) > 0
        }

    def _settle(self, stage: str, now_s: float) -> None:
        since = max(self._since.get(stage, 0.0), self.start_s)
        until = min(now_s, self.stop_s)
        if until > since:
            gained = self._rate.get(stage, 0.0) * (until - since)
            self._capacity[stage] = self._capacity.get(stage, 0.0) + gained
        self._since[stage] = max(now_s, self._since.get(stage, 0.0))
        self._capacity.setdefault(stage, 0.0)


class QueueSamples:
    """Queue lengths at the start of each bin, 0 where no sample was taken."""

    def __init__(self, bin_s: float, clusters: Iterable[str]) -> None:
        self.bin_s = bin_s
        self._prefill: dict[str, dict[int, int]] = {cluster: {} for cluster in clusters}
        self._decode: dict[int, int] = {}

    def take(self, now_s: float, prefill: Mapping[str, int], decode: int) -> None:
        place = int(now_s / self.bin_s + 0.5)
        for cluster, waiting in prefill.items():
            if waiting:
                self._prefill[cluster][place] = waiting
        if decode:
            self._decode[place] = decode

    def series(self, end_s: float, egress: Mapping[LinkId, list[float]]) -> Series:
        bins = int(end_s / self.bin_s) + 1

        def column(values: Mapping[int, int]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
            filled = np.zeros(bins)
            for place, value in values.items():
                if place < bins:
                    filled[place] = value
            return filled

        bits = {}
        for link, carried in egress.items():
            bits[link] = np.zeros(bins)
            bits[link][: len(carried)] = carried[:bins]
        return Series(
            bin_s=self.bin_s,
            egress_bits=bits,
            prefill_queue={name: column(values) for name, values in self._prefill.items()},
            decode_queue=column(self._decode),
        )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else (float("inf") if part > 0 else 0.0)
