"""The processes of a deployment, as command lines. Pure: this module starts and looks up nothing.

The kernel chooses the ports, so each stage needs the addresses that the stage before it announced:
kvds first, then engines and the relays of links between clusters, then the gateways, which read all
addresses from one deployment file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from prfaas.config import Deployment
from prfaas.config.deployment import Cluster, GatewayEntry, Link, Node
from prfaas.config.gateway import DEFAULTS, GatewayTimeouts
from prfaas.config.host import KvdTimeouts, NodeTimeouts
from prfaas.contracts.readiness import (
    GatewayReady,
    KvdReady,
    NodeReady,
    RelayReady,
    parse_readiness,
)
from prfaas.launch.attached_process import PROGRAM
from prfaas.launch.children import Command
from prfaas.launch.services.builders import (
    engine_service,
    gateway_service,
    kvd_service,
    relay_service,
)
from prfaas.launch.services.hosts import EngineSpec, Host, list_hosts
from prfaas.launch.services.places import HostPlace

VLLM_KV_BYTES = 64 << 20
VLLM_MAX_TOKENS = 4096
# One block at a time: without Triton vLLM's Mamba kernels cannot cut a chunk at a block boundary.
VLLM_STEP_TOKENS = 128
VLLM_READY = "Application startup complete"  # a line of vLLM's HTTP library
# Several engines share this machine: with more threads each, they would wait for one another.
ENGINE_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
DRAIN_S = 2.0  # running requests may finish, but a demonstration stops soon


def kvd_command(
    host: Host, folder: Path, engines: EngineSpec, at: KvdReady | None = None
) -> Command[KvdReady]:
    """`at`: the addresses of an earlier start, which the kvd uses again."""
    place = _place(host, folder)
    if at is not None:
        http = at.http.removeprefix("http://")
        place = msgspec.structs.replace(place, kvd_listen=at.data, kvd_http=http)
    service = kvd_service(host, engines, place)
    return Command(service.name, service.words, partial(parse_readiness, kind=KvdReady))


def _place(host: Host, folder: Path) -> HostPlace:
    """All hosts share this machine: each kvd's worker processes would be for all of its cores. And
    nothing else sends requests to these nodes when they are stopped."""
    return HostPlace(
        name=host.name,
        socket=str(folder / f"{host.name}.sock"),
        events=f"{folder / host.name}.events",
        ssd=str(folder / f"{host.name}.ssd"),
        kvd_workers=0,
        kvd_timeouts=KvdTimeouts(drain_s=DRAIN_S),
        node_timeouts=NodeTimeouts(drain_s=DRAIN_S, leave_s=0),
    )


def engine_command(
    host: Host, folder: Path, kvd: KvdReady, engines: EngineSpec, port: int = 0
) -> Command[NodeReady]:
    """vLLM needs a `port`; other engines choose a free one."""
    place = msgspec.structs.replace(_place(host, folder), kvd_url=kvd.http, node_port=port)
    if engines.kind == "vllm":
        return _vllm_command(host, engines, place)
    service = engine_service(host, engines, place)
    readiness = partial(parse_readiness, kind=NodeReady)
    return Command(service.name, service.words, readiness, ENGINE_ENVIRONMENT)


def _vllm_command(host: Host, engines: EngineSpec, place: HostPlace) -> Command[NodeReady]:
    url = f"http://127.0.0.1:{place.node_port}"
    arguments = [PROGRAM, str(engines.python), "-P", "-m", "vllm.entrypoints.openai.api_server"]
    service = engine_service(host, engines, msgspec.structs.replace(place, node_url=url))
    _, model, *options = service.words  # the module takes the model as an option
    arguments += ["--model", model, *options]
    arguments += ["--dtype", "float32", "--max-model-len", str(VLLM_MAX_TOKENS)]
    arguments += ["--enforce-eager", "--mamba-cache-mode", "align"]
    arguments += ["--max-num-batched-tokens", str(VLLM_STEP_TOKENS)]
    arguments += ["--kv-cache-memory-bytes", str(VLLM_KV_BYTES), "--no-enable-log-requests"]

    def readiness(line: str) -> NodeReady | None:
        return NodeReady(engines.name, url) if VLLM_READY in line else None

    return Command(
        host.name,
        arguments,
        readiness,
        environment={
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # OpenMP threads of two servers on the same cores would wait for each other.
            "VLLM_CPU_OMP_THREADS_BIND": str(engines.cores[host.number % len(engines.cores)]),
        },
    )


class RelayedLink(NamedTuple):
    """A link between clusters, which a relay emulates, and the hosts that it leads to."""

    link: Link
    hosts: Sequence[Host]

    @property
    def name(self) -> str:
        return f"wan-{self.link.source}-{self.link.target}"


def relayed_links(deployment: Deployment) -> list[RelayedLink]:
    """The links between clusters. Hosts of one cluster reach each other without a relay."""
    hosts = list_hosts(deployment)
    return [
        RelayedLink(link, [host for host in hosts if host.cluster == link.target])
        for link in deployment.links
        if link.source != link.target
    ]


def relay_command(
    relayed: RelayedLink,
    kvds: Mapping[str, KvdReady],
    on_line: Callable[[str], None] | None = None,
) -> Command[RelayReady]:
    targets = [kvds[host.name].data for host in relayed.hosts]
    service = relay_service(relayed.name, relayed.link, targets)
    readiness = partial(parse_readiness, kind=RelayReady)
    return Command(service.name, service.words, readiness, on_line=on_line)


def relay_addresses(ready: RelayReady, relayed: RelayedLink) -> dict[str, str]:
    """The relay's address for each host that the link leads to, by the host's name."""
    names = [host.name for host in relayed.hosts]
    return dict(zip(names, (pair.listen for pair in ready.addresses), strict=True))


def gateway_command(
    file: Path,
    options: Sequence[str] = (),
    on_line: Callable[[str], None] | None = None,
    *,
    name: str = "gateway",
    cluster: str | None = None,
) -> Command[GatewayReady]:
    """`cluster`: the PD cluster whose requests arrive there; None: those of all."""
    timeouts = GatewayTimeouts(drain_s=DRAIN_S, leave_s=0)
    service = gateway_service(
        str(file), DEFAULTS, name=name, cluster=cluster, timeouts=timeouts, options=options
    )
    readiness = partial(parse_readiness, kind=GatewayReady)
    return Command(service.name, service.words, readiness, on_line=on_line)


def with_nodes(
    deployment: Deployment,
    urls: Mapping[str, str],
    kvds: Mapping[str, KvdReady],
    relays: Mapping[str, Mapping[str, str]],
) -> Deployment:
    """The deployment with the addresses of every running node. `relays` are the addresses of the
    relays to each host, by the cluster that sends."""
    clusters = {cluster.name for cluster in deployment.clusters}

    def node(host: Host) -> Node:
        # The hosts may be those of a larger deployment.
        led = relays.get(host.name, {})
        via = {source: address for source, address in led.items() if source in clusters}
        return Node(urls[host.name], kvds[host.name].http, via or None)

    def with_its_nodes(cluster: Cluster) -> Cluster:
        nodes = [node(host) for host in list_hosts(deployment) if host.cluster == cluster.name]
        return msgspec.structs.replace(cluster, nodes=nodes)

    return msgspec.structs.replace(
        deployment, clusters=[with_its_nodes(cluster) for cluster in deployment.clusters]
    )


def with_gateways(deployment: Deployment, ports: Mapping[str, int]) -> Deployment:
    """The deployment with a gateway on this machine for each PD cluster, at these ports. Without
    ports, one gateway serves all."""
    entries = [GatewayEntry(home, f"http://127.0.0.1:{port}") for home, port in ports.items()]
    return msgspec.structs.replace(deployment, gateways=entries)
