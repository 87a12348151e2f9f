"""The gain from replicating hot prefixes: TTFT with and without it, on the same requests.

\b
    python -m prfaas_lab bench moves [--rounds 2] [--fabric-gbps 2] [--shared 32768] [--topics 4]
                                     [--requests 40]

The deployment has two prefill nodes and one decode node, as processes: emulated engines (8 H20
each, the case study's model), kvds and a gateway. A relay with the fabric's rate is in front of
each prefill node, so that a copy takes a realistic time. Topics come one after the other. The
requests of a topic share a long prefix, which one prefill node has, and come faster than that node
can serve them. Without replication, a route still copies a prefix as soon as a copy is faster than
the queue. Prints JSON, in seconds of the deployment (one of them is `--time-scale` seconds of the
machine):

\b
  runs    in order: TTFT, copies by cause, the generator's lag
  ttft_s  all rounds together, `with` and `without`; `gain` is the share that replication saves
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np
import uvloop

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment, parse_deployment
from prfaas.config.address import Address
from prfaas.config.trace import TRACE_BLOCK_TOKENS
from prfaas.display.console import print_json, progress_bar, run_benchmark
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch import commands
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.children import Children
from prfaas.launch.deployment import RunningDeployment, RunningHosts, launched_gateway
from prfaas.launch.preparation import LaunchOptions, LaunchPlan, prepare_launch
from prfaas.launch.services.hosts import Host, list_hosts
from prfaas.measure.client import connect
from prfaas.measure.open_loop import RequestResult, RequestTemplate, offer_load
from prfaas.measure.prompts import PromptGenerator
from prfaas.measure.summary import summarise_load
from prfaas.scheduler.costs import build_costs
from prfaas.sim.arrivals import Arrivals
from prfaas.studies.problem_files import Study
from prfaas.types import BlockHash, ClusterId
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay

MODEL = "case-study-1t"
PREFILL = 2  # number of prefill nodes
OWN_TOKENS = 500  # of each prompt, after the shared prefix
OUTPUT_TOKENS = 16
BYTE_SCALE = 2e-3
LOAD = 1.5  # times the capacity of one prefill node


def deployment(fabric_gbps: float, shared: int) -> Deployment:
    raw: dict[str, Any] = {
        "model": {"name": MODEL},
        "workload": {
            **{"kind": "lognormal", "mu": 6.2, "sigma": 0.1, "min_tokens": 128},
            **{"max_tokens": 1024, "cached_tokens": shared, "output_tokens": OUTPUT_TOKENS},
        },
        "slo": {"output_tokens_per_s": 40},
        "clusters": [
            {
                **{"name": "pd", "kind": "pd", "accelerator": "h20", "gpus": 24},
                **{"gpus_per_instance": 8, "prefill": PREFILL, "decode": 1},
            }
        ],
        "links": [{"from": "pd", "to": "pd", "gbps": fabric_gbps}],
        "scheduler": {"policy": "local"},
    }
    return parse_deployment(raw, __file__)


def topics(count: int, shared: int, each: int, rps: float, seed: int) -> Arrivals:
    """The requests of all topics, one topic after the other, at Poisson times."""
    blocks = shared // TRACE_BLOCK_TOKENS
    hashes = [
        tuple(BlockHash(b"topic %d block %d" % (topic, n)) for n in range(blocks))
        for topic in range(count)
        for _ in range(each)
    ]
    total = len(hashes)
    return Arrivals(
        np.cumsum(np.random.default_rng(seed).exponential(1 / rps, total)),
        np.full(total, blocks * TRACE_BLOCK_TOKENS + OWN_TOKENS),
        np.zeros(total, np.int64),
        np.full(total, OUTPUT_TOKENS),
        hashes,
    )


def first_of_each(arrivals: Arrivals, each: int, apart_s: float) -> Arrivals:
    """One request per topic. None waits, so the node that prefills it then has the prefix."""
    assert arrivals.hashes is not None
    chosen = slice(None, None, each)
    hashes = arrivals.hashes[chosen]
    return Arrivals(
        apart_s * np.arange(1.0, len(hashes) + 1),
        arrivals.prompt_tokens[chosen],
        arrivals.cached_tokens[chosen],
        arrivals.output_tokens[chosen],
        hashes,
    )


@contextmanager
def fabric(hosts: Sequence[Host], rate_bps: float) -> Iterator[dict[str, list[str]]]:
    """Host -> options of its kvd. A relay limits the kvds of prefill nodes to `rate_bps`."""
    with ExitStack() as stack:
        options: dict[str, list[str]] = {host.name: [] for host in hosts}
        for host in hosts[:PREFILL]:
            with socket.create_server(("127.0.0.1", 0)) as holder:
                target = Address("127.0.0.1", holder.getsockname()[1])
            relay = Relay(Address("127.0.0.1", 0), target, Conditions(rate_bps=rate_bps))
            stack.enter_context(closing(relay.start()))
            options[host.name] = [
                *("--listen", str(target)),
                *("--set", f"kvd.via={relay.address}"),
            ]
        yield options


async def measure(
    made: LaunchPlan, arrivals: Arrivals, each: int, apart_s: float, rounds: int, folder: Path
) -> list[dict[str, Any]]:
    all_hosts = list_hosts(made.deployment)
    (link,) = made.deployment.links
    runs = []
    with fabric(all_hosts, link.gbps * 1e9) as options:
        async with Children(folder, attached_prefix()) as children:
            kvds = [commands.kvd_command(host, folder, made.engines) for host in all_hosts]
            started = await children.start_all(
                [
                    replace(kvd, arguments=[*kvd.arguments, *options[host.name]])
                    for kvd, host in zip(kvds, all_hosts, strict=True)
                ]
            )
            at = {host.name: started[f"kvd-{host.name}"] for host in all_hosts}
            nodes = await children.start_all(
                [
                    commands.engine_command(host, folder, at[host.name], made.engines)
                    for host in all_hosts
                ]
            )
            urls = {name: node.http for name, node in nodes.items()}
            hosts = RunningHosts(made.deployment, folder, urls, at, {}, children)
            for number in range(2 * rounds):
                replicate = number % 4 in (1, 2)  # without, with, with, without
                click.echo(f"run {number + 1}: replicate {replicate}", err=True)
                runs.append(await _run(hosts, replicate, arrivals, each, apart_s))
    return runs


async def _run(
    hosts: RunningHosts, replicate: bool, arrivals: Arrivals, each: int, apart_s: float
) -> dict[str, Any]:
    rules = hosts.deployment.scheduler
    moves = msgspec.structs.replace(rules.moves, replicate=replicate)
    rules = msgspec.structs.replace(rules, moves=moves)
    changed = msgspec.structs.replace(hosts.deployment, scheduler=rules)
    clock = MonotonicClock()
    async with launched_gateway(hosts, changed) as live:
        prefilling = [n["node"] for n in await _nodes(live) if n["role"] == "prefill"]
        assert prefilling == list(hosts.kvds)[:PREFILL], "a prefill node has no relay"
        async with connect(live.gateway_url, clock) as target:
            assert target.model is not None
            ask, prompts = RequestTemplate(target.model, secrets.token_hex(8)), PromptGenerator()
            warm = first_of_each(arrivals, each, apart_s)
            _without_errors(await offer_load(target, warm, ask, prompts, clock, seed=1))
            with progress_bar("answered", len(arrivals)) as show:
                outcomes = await offer_load(target, arrivals, ask, prompts, clock, done=show)
        state = await live.state()
    _without_errors(outcomes)
    return {"replicate": replicate, "outcomes": outcomes, "moves": state["moves"]}


async def _nodes(live: RunningDeployment) -> list[dict[str, Any]]:
    return [node for cluster in (await live.state())["clusters"] for node in cluster["nodes"]]


def _without_errors(outcomes: Sequence[RequestResult]) -> None:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise InputError(f"{len(errors)} requests failed: {errors[0]}", where="the gateway")


def figures(runs: Sequence[dict[str, Any]], time_scale: float) -> dict[str, Any]:
    def spread(outcomes: Sequence[RequestResult]) -> dict[str, float]:
        found = summarise_load(outcomes).ttft_s
        assert found is not None
        return {name: round(value / time_scale, 3) for name, value in asdict(found).items()}

    together = {
        name: spread([o for run in runs if run["replicate"] is wanted for o in run["outcomes"]])
        for name, wanted in (("without", False), ("with", True))
    }
    gain = {
        name: round(1 - together["with"][name] / value, 3)
        for name, value in together["without"].items()
    }
    shown = []
    for run in runs:
        outcomes = run["outcomes"]
        late_s = max(outcome.late_s for outcome in outcomes) / time_scale
        shown.append(
            {
                "replicate": run["replicate"],
                "ttft_s": spread(outcomes),
                "moves": {why: made for why, made in run["moves"].items() if why != "under_way"},
                "late_s_max": round(late_s, 3),
            }
        )
    return {"runs": shown, "ttft_s": {**together, "gain": gain}}


def expected_s(made: LaunchPlan, shared: int) -> dict[str, float]:
    """Seconds of a prefill without the prefix, of one with it, and of a copy of the prefix."""
    costs = build_costs(
        Study(Path(__file__), "exact").problem(made.deployment), shared + OWN_TOKENS
    )
    prefill_s = costs.prefill_s[ClusterId("pd")]
    copied_bits = costs.handoff_bytes(shared, shared) * 8
    return {
        "computed": prefill_s(shared + OWN_TOKENS, 0),
        "resumed": prefill_s(OWN_TOKENS, shared),
        "copied": copied_bits / costs.fabric_bps(ClusterId("pd")),
    }


@click.command(help=__doc__)
@click.option(
    "--rounds", default=2, show_default=True, help="Runs with replication, and as many without."
)
@click.option("--fabric-gbps", default=2.0, show_default=True, help="Rate of the fabric.")
@click.option("--shared", default=32768, show_default=True, help="Tokens of a topic's prefix.")
@click.option("--topics", "count", default=4, show_default=True, help="Number of topics.")
@click.option("--requests", "each", default=40, show_default=True, help="Requests of each topic.")
@click.option("--time-scale", default=0.5, show_default=True, help="Factor on all times.")
@click.option("--seed", default=0, show_default=True, help="Seed of the arrivals.")
@click.option("--json", "as_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(
    rounds: int,
    fabric_gbps: float,
    shared: int,
    count: int,
    each: int,
    time_scale: float,
    seed: int,
    as_json: bool,
) -> None:
    if rounds < 1 or count < 1 or each < 1 or shared < TRACE_BLOCK_TOKENS:
        raise InputError(
            "an option is out of range", fix="give more rounds, topics, requests or tokens"
        )
    stated = deployment(fabric_gbps, shared)
    with tempfile.TemporaryDirectory(prefix="prfaas-moves-") as name:
        folder = Path(name)
        options = LaunchOptions("emulated", Scales(time_scale, BYTE_SCALE, 1.0))
        made = prepare_launch(stated, Path(__file__), options, folder)
        expected = expected_s(made, shared)
        rps = LOAD / expected["resumed"]
        arrivals = topics(count, shared, each, rps, seed)
        apart_s = 1.2 * expected["computed"]
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runs = runner.run(measure(made, arrivals, each, apart_s, rounds, folder))
    print_json(
        {
            "cores": os.cpu_count(),
            "shared_tokens": shared,
            "requests": len(arrivals),
            "offered_rps": round(rps * time_scale, 3),
            "expected_s": {name: round(s / time_scale, 3) for name, s in expected.items()},
            **figures(runs, time_scale),
        }
    )


if __name__ == "__main__":
    run_benchmark(main)
