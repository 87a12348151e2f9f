"""The processes of a deployment, as command lines. Pure: this module starts and looks up nothing.

The kernel chooses the ports, so each stage needs the addresses that the stage before it announced:
kvds first, then engines and the relays of links between clusters, then the gateways, which read all
addresses from one deployment file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from prfaas.config import Deployment
from prfaas.config.deployment import Cluster, GatewayEntry, Link, Node
from prfaas.config.host import NodeSection
from prfaas.contracts.readiness import (
    GatewayReady,
    KvdReady,
    NodeReady,
    RelayReady,
    parse_readiness,
)
from prfaas.launch.attached_process import PROGRAM
from prfaas.launch.children import Command

EngineKind: TypeAlias = Literal["hf", "emulated", "vllm"]
VLLM_KV_BYTES = 64 << 20
VLLM_MAX_TOKENS = 4096
# One block at a time: without Triton vLLM's Mamba kernels cannot cut a chunk at a block boundary.
VLLM_STEP_TOKENS = 128
VLLM_READY = "Application startup complete"  # a line of vLLM's HTTP library
# Several engines share this machine: with more threads each, they would wait for one another.
ENGINE_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
DRAIN_S = 2.0  # running requests may finish, but a demonstration stops soon


@dataclass(frozen=True, slots=True)
class Host:
    """One instance of a cluster: an engine and its kvd."""

    name: str
    cluster: str
    accelerator: str
    gpus: int
    number: int = 0  # among all hosts


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The engine and the kvd of every host."""

    kind: EngineKind
    model: str  # a checkpoint's folder; emulated: a name of the catalog
    name: str  # as clients request it
    memory: str  # of each kvd, as `prfaas kvd --memory` takes it
    block_tokens: int = NodeSection().block_tokens
    catalog: Sequence[Path] = ()  # emulated: files with its profile
    tokenizer: Path | None = None
    python: Path | None = None  # vllm: the interpreter that has it
    cores: Sequence[int] = (0,)  # vllm: of this machine; each engine has one of them
    device: str | None = None  # hf: None: the best that is present
    ssd_size: str | None = None  # of each kvd's SSD tier, in the deployment's folder; None: none
    options: Sequence[str] = ()  # of every kvd and `prfaas node`, such as --member-key-file FILE


def list_hosts(deployment: Deployment) -> list[Host]:
    instances = [(cluster, n) for cluster in deployment.clusters for n in range(cluster.instances)]
    return [
        Host(f"{c.name}-{n}", c.name, c.accelerator, c.gpus_per_instance, number)
        for number, (c, n) in enumerate(instances)
    ]


def kvd_command(
    host: Host, folder: Path, engines: EngineSpec, at: KvdReady | None = None
) -> Command[KvdReady]:
    """`at`: the addresses of an earlier start, which the kvd uses again."""
    arguments = ["kvd", "--socket", str(socket_of(host, folder)), "--node", host.name]
    arguments += ["--cluster", host.cluster, "--memory", engines.memory]
    if engines.ssd_size is not None:
        arguments += ["--ssd", str(folder / f"{host.name}.ssd")]
        arguments += ["--set", f"kvd.ssd_size={engines.ssd_size}"]
    arguments += ["--set", f"kvd.timeouts.drain_s={DRAIN_S:g}"]
    # All hosts share this machine: each kvd's worker processes would be for all of its cores.
    arguments += ["--set", "kvd.workers=0"]
    if at is not None:
        arguments += ["--listen", at.data, "--http", at.http.removeprefix("http://")]
    arguments += engines.options
    return Command(f"kvd-{host.name}", arguments, partial(parse_readiness, kind=KvdReady))


def socket_of(host: Host, folder: Path) -> Path:
    return folder / f"{host.name}.sock"


def engine_command(
    host: Host, folder: Path, kvd: KvdReady, engines: EngineSpec, port: int = 0
) -> Command[NodeReady]:
    """vLLM needs a `port`; other engines choose a free one."""
    if engines.kind == "vllm":
        return _vllm_command(host, folder, engines, port)
    arguments = ["node", "--engine", engines.kind, "--model", engines.model]
    arguments += ["--name", engines.name, "--kvd", str(socket_of(host, folder))]
    arguments += ["--kvd-url", kvd.http, "--port", str(port)]
    # Nothing else sends requests to these nodes when they are stopped.
    keys = [f"timeouts.drain_s={DRAIN_S:g}", "timeouts.leave_s=0"]
    keys.append(f"block_tokens={engines.block_tokens}")
    if engines.kind == "hf" and engines.device is not None:
        arguments += ["--device", engines.device]
    if engines.kind == "emulated":
        arguments += ["--accelerator", host.accelerator]
        catalog = json.dumps([str(path) for path in engines.catalog])
        keys += [f"emulated.gpus={host.gpus}", f"emulated.catalog={catalog}"]
        if engines.tokenizer is not None:
            keys.append(f"tokenizer={engines.tokenizer}")
    for key in keys:
        arguments += ["--set", f"node.{key}"]
    arguments += engines.options
    return Command(
        host.name, arguments, partial(parse_readiness, kind=NodeReady), ENGINE_ENVIRONMENT
    )


def _vllm_command(host: Host, folder: Path, engines: EngineSpec, port: int) -> Command[NodeReady]:
    url = f"http://127.0.0.1:{port}"
    connector = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvd": str(socket_of(host, folder)), "url": url},
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{folder / host.name}.events",
    }
    arguments = [PROGRAM, str(engines.python), "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", engines.model, "--served-model-name", engines.name]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    arguments += ["--dtype", "float32", "--max-model-len", str(VLLM_MAX_TOKENS)]
    arguments += ["--enable-prefix-caching", "--mamba-cache-mode", "align"]
    arguments += ["--max-num-batched-tokens", str(VLLM_STEP_TOKENS)]
    arguments += ["--kv-cache-memory-bytes", str(VLLM_KV_BYTES), "--no-enable-log-requests"]
    arguments += ["--kv-transfer-config", json.dumps(connector)]
    arguments += ["--kv-events-config", json.dumps(events)]

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
    arguments = ["wan", "--control", "--gbps", f"{relayed.link.gbps:g}"]
    arguments += ["--rtt-ms", f"{relayed.link.rtt_ms:g}"]
    for host in relayed.hosts:
        arguments += ["--listen", "127.0.0.1:0", "--to", kvds[host.name].data]
    readiness = partial(parse_readiness, kind=RelayReady)
    return Command(relayed.name, arguments, readiness, on_line=on_line)


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
    arguments = ["gateway", str(file)]
    if cluster is not None:
        arguments += ["--cluster", cluster]
    for key in (f"drain_s={DRAIN_S:g}", "leave_s=0"):
        arguments += ["--set", f"gateway.timeouts.{key}"]
    arguments += options
    readiness = partial(parse_readiness, kind=GatewayReady)
    return Command(name, arguments, readiness, on_line=on_line)


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
