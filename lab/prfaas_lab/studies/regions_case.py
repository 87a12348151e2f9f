"""A scaled-down deployment of several PD clusters on emulated accelerators, under load.

`bench agree --case two_by_two` serves, plans and simulates it. Requests go to the gateway of the PD
cluster at which they arrive. The bytes over each link are those that its relay has carried.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment
from prfaas.demo.shared import RelayReader
from prfaas.demo.small_case import Array, first_tokens_s
from prfaas.engine.emulated.pace import Scales
from prfaas.gateway.generation import CLUSTER_HEADER
from prfaas.launch.commands import relayed_links
from prfaas.launch.deployment import RunningHosts, launched_gateway
from prfaas.launch.preparation import LaunchOptions, prepare_launch
from prfaas.launch.services.hosts import EngineSpec
from prfaas.measure.client import connect
from prfaas.measure.open_loop import RequestResult, RequestTemplate, offer_load
from prfaas.measure.prompts import PromptGenerator
from prfaas.planner.network.problem import NetworkProblem
from prfaas.sim.arrivals import Arrivals
from prfaas.studies.network_plans import NetworkStudy

Link: TypeAlias = tuple[str, str]  # the clusters from which and to which it leads


@dataclass(frozen=True, slots=True)
class RegionsCase:
    deployment: Deployment
    engines: EngineSpec
    problem: NetworkProblem

    @property
    def homes(self) -> list[str]:
        """The PD clusters, in the order of the numbers in `Arrivals.homes`."""
        return [home.cluster for home in self.problem.homes]


def regions_case(deployment: Deployment, file: Path, folder: Path, scales: Scales) -> RegionsCase:
    """`deployment` is the content of `file`, or a part of it. The files that engines read are
    written to `folder`."""
    made = prepare_launch(deployment, file, LaunchOptions("emulated", scales), folder)
    problem = NetworkStudy(folder / "deployment.toml", "exact").network(made.deployment)
    return RegionsCase(made.deployment, made.engines, problem)


@dataclass(frozen=True, slots=True)
class RegionsLoad:
    """Results of one load on live processes."""

    first_token_s: Array  # since the beginning, in the order of the arrivals; NaN: none
    outcomes: Mapping[str, list[RequestResult]]  # by PD cluster
    egress_bps: Mapping[Link, float]  # of each relay, until the last arrival


def arrivals_at(arrivals: Arrivals, home: int) -> Arrivals:
    """The requests that arrive at one PD cluster."""
    assert arrivals.homes is not None, "there are several PD clusters"
    assert arrivals.hashes is None and arrivals.answers is None, "a trace has one PD cluster"
    here = arrivals.homes == home
    return Arrivals(
        arrivals.at_s[here],
        arrivals.prompt_tokens[here],
        arrivals.cached_tokens[here],
        arrivals.output_tokens[here],
    )


async def run_regions_load(
    hosts: RunningHosts,
    deployment: Deployment,
    homes: Sequence[str],
    arrivals: Arrivals,
    relay_reader: RelayReader,
    *,
    together: bool = False,
) -> RegionsLoad:
    """Starts the gateways of the hosts and sends each request to that of its home. Requests that
    have not ended at the last arrival are cancelled. `together`: one gateway serves all homes, and
    each request names its own."""
    clock = MonotonicClock()
    until_s = float(arrivals.at_s[-1])
    parts = {home: arrivals_at(arrivals, number) for number, home in enumerate(homes)}
    async with AsyncExitStack() as stack:
        live = await stack.enter_async_context(
            launched_gateway(hosts, deployment, together=together)
        )
        targets = {}
        for home in homes:
            headers = {CLUSTER_HEADER: home} if together else {}
            connected = connect(live.gateway_urls[home], clock, headers=headers)
            targets[home] = await stack.enter_async_context(connected)
        salt = secrets.token_hex(8)
        before = await carried_bytes(hosts, relay_reader)
        loads = [
            asyncio.create_task(
                offer_load(
                    targets[home],
                    parts[home],
                    RequestTemplate(deployment.model.name, salt=salt),
                    PromptGenerator(),
                    clock,
                    seed=number,  # so that no two homes have the same prompts
                    give_up_s=until_s,
                )
            )
            for number, home in enumerate(homes)
        ]
        try:
            await asyncio.sleep(until_s)
            after = await carried_bytes(hosts, relay_reader)
            found = await asyncio.gather(*loads)
        finally:
            for load in loads:
                load.cancel()
            await asyncio.gather(*loads, return_exceptions=True)
    outcomes = dict(zip(homes, found, strict=True))
    return RegionsLoad(
        merged_first_tokens_s(arrivals, [(parts[home], outcomes[home]) for home in homes]),
        outcomes,
        {link: (after[link] - before[link]) * 8 / until_s for link in after},
    )


def merged_first_tokens_s(
    arrivals: Arrivals, parts: Sequence[tuple[Arrivals, Sequence[RequestResult]]]
) -> Array:
    """Times of the first tokens in the order of all arrivals, from those of each PD cluster."""
    assert arrivals.homes is not None, "there are several PD clusters"
    first_s = np.full(len(arrivals), np.nan)
    for number, (part, outcomes) in enumerate(parts):
        first_s[arrivals.homes == number] = first_tokens_s(part, outcomes)
    return first_s


async def carried_bytes(hosts: RunningHosts, relay_reader: RelayReader) -> dict[Link, int]:
    """One relay is asked after the other: their answers do not say which relay they are from."""
    return {
        (way.link.source, way.link.target): await relay_reader.carried_bytes(
            hosts.children.named(way.name)
        )
        for way in relayed_links(hosts.deployment)
    }
