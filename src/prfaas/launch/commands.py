"""The processes of a deployment, as command lines. Pure: nothing is started or looked up here.

Ports are the kernel's choice, so each stage needs what the one before it has said: kvds first, then
engines and the relays of links between clusters, then the gateway, which reads everything from a
deployment file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

import msgspec

from prfaas.config import Deployment
from prfaas.config.deployment import Cluster, Link, Node
from prfaas.launch.children import Command

EngineKind: TypeAlias = Literal["hf", "emulated", "vllm"]
VLLM_KV_BYTES = 64 << 20
VLLM_MAX_TOKENS = 4096
# One block at a time: without Triton vLLM's Mamba kernels cannot cut a chunk at a block boundary.
VLLM_STEP_TOKENS = 128
# Several engines share this machine: more threads each would only wait for one another.
ENGINE_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
DRAIN_S = 2.0  # what has begun may end, but nobody waits long for a demonstration to stop


class KvdAt(NamedTuple):
    data: str
    url: str


@dataclass(frozen=True, slots=True)
class Host:
    """One instance of a cluster: an engine and its kvd."""

    name: str
    cluster: str
    accelerator: str
    gpus: int
    number: int = 0  # among all hosts


@dataclass(frozen=True, slots=True)
class Engines:
    """What the engines are, the same on every host."""

    kind: EngineKind
    model: str  # a checkpoint's folder; emulated: a name of the catalog
    name: str  # as clients ask for it
    memory: str  # of each kvd, as `prfaas kvd --memory` takes it
    block_tokens: int = 64
    catalog: Sequence[Path] = ()  # emulated: where its profile is
    tokenizer: Path | None = None
    python: Path | None = None  # vllm: the interpreter that has it
    cores: Sequence[int] = (0,)  # vllm: of this machine; each engine has one of them
    device: str | None = None  # hf: None: the best there is
    ssd_size: str | None = None  # of each kvd's second tier, in the deployment's folder; None: none


def hosts(deployment: Deployment) -> list[Host]:
    places = [(cluster, n) for cluster in deployment.clusters for n in range(cluster.instances)]
    return [
        Host(f"{c.name}-{n}", c.name, c.accelerator, c.gpus_per_instance, number)
        for number, (c, n) in enumerate(places)
    ]


def kvd(host: Host, folder: Path, engines: Engines, at: KvdAt | None = None) -> Command:
    """`at`: where it has been before, and is to be again."""
    arguments = ["kvd", "--socket", str(socket_of(host, folder)), "--node", host.name]
    arguments += ["--cluster", host.cluster, "--memory", engines.memory]
    if engines.ssd_size is not None:
        arguments += ["--ssd", str(folder / f"{host.name}.ssd"), "--ssd-size", engines.ssd_size]
    if at is not None:
        arguments += ["--listen", at.data, "--http", at.url.removeprefix("http://")]
    return Command(f"kvd-{host.name}", arguments, ready=r"data (\S+, http \S+)$")


def parse_kvd(said: str) -> KvdAt:
    data, _, url = said.partition(", http ")
    return KvdAt(data, url)


def socket_of(host: Host, folder: Path) -> Path:
    return folder / f"{host.name}.sock"


def engine(host: Host, folder: Path, kvd: KvdAt, engines: Engines, port: int = 0) -> Command:
    if engines.kind == "vllm":
        return _vllm(host, folder, engines, port)
    arguments = ["node", "--engine", engines.kind, "--model", engines.model]
    arguments += ["--name", engines.name, "--kvd", str(socket_of(host, folder))]
    arguments += ["--kvd-url", kvd.url, "--drain-s", f"{DRAIN_S:g}", "--port", str(port)]
    arguments += ["--block-tokens", str(engines.block_tokens)]
    if engines.kind == "hf" and engines.device is not None:
        arguments += ["--device", engines.device]
    if engines.kind == "emulated":
        arguments += ["--accelerator", host.accelerator, "--gpus", str(host.gpus)]
        for path in engines.catalog:
            arguments += ["--catalog", str(path)]
        if engines.tokenizer is not None:
            arguments += ["--tokenizer", str(engines.tokenizer)]
    return Command(
        host.name, arguments, ready=r"serving \S+ at (\S+)", environment=ENGINE_ENVIRONMENT
    )


def _vllm(host: Host, folder: Path, engines: Engines, port: int) -> Command:
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
    arguments = ["--program", str(engines.python), "-m", "vllm.entrypoints.openai.api_server"]
    arguments += ["--model", engines.model, "--served-model-name", engines.name]
    arguments += ["--host", "127.0.0.1", "--port", str(port), "--enforce-eager"]
    arguments += ["--dtype", "float32", "--max-model-len", str(VLLM_MAX_TOKENS)]
    arguments += ["--enable-prefix-caching", "--mamba-cache-mode", "align"]
    arguments += ["--max-num-batched-tokens", str(VLLM_STEP_TOKENS)]
    arguments += ["--kv-cache-memory-bytes", str(VLLM_KV_BYTES), "--no-enable-log-requests"]
    arguments += ["--kv-transfer-config", json.dumps(connector)]
    arguments += ["--kv-events-config", json.dumps(events)]
    return Command(
        host.name,
        arguments,
        # The server says where it listens only in words of its HTTP library.
        ready=r"(Application startup complete)",
        environment={
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # OpenMP threads of two servers on the same cores would wait for each other.
            "VLLM_CPU_OMP_THREADS_BIND": str(engines.cores[host.number % len(engines.cores)]),
        },
    )


class Way(NamedTuple):
    """A link between clusters, and the hosts that it leads to."""

    link: Link
    hosts: Sequence[Host]

    @property
    def name(self) -> str:
        return f"wan-{self.link.source}-{self.link.target}"


def ways(deployment: Deployment) -> list[Way]:
    """Links that a relay stands for: between clusters. Within one, hosts reach each other."""
    everybody = hosts(deployment)
    return [
        Way(link, [host for host in everybody if host.cluster == link.target])
        for link in deployment.links
        if link.source != link.target
    ]


def relay(
    way: Way, kvds: Mapping[str, KvdAt], heard: Callable[[str], None] | None = None
) -> Command:
    arguments = ["wan", "--control", "--gbps", f"{way.link.gbps:g}"]
    arguments += ["--rtt-ms", f"{way.link.rtt_ms:g}"]
    for host in way.hosts:
        arguments += ["--listen", "127.0.0.1:0", "--to", kvds[host.name].data]
    return Command(way.name, arguments, ready=r"^relaying (.*): .*ends it$", heard=heard)


def parse_relay(said: str, way: Way) -> dict[str, str]:
    """The relay's address of each host."""
    pairs = [pair.split(" to ")[0] for pair in said.split(", ")]
    return dict(zip((host.name for host in way.hosts), pairs, strict=True))


def gateway(
    file: Path,
    options: Sequence[str] = (),
    heard: Callable[[str], None] | None = None,
    *,
    name: str = "gateway",
) -> Command:
    arguments = ["gateway", str(file), "--drain-s", f"{DRAIN_S:g}", *options]
    return Command(name, arguments, ready=r"^serving \S+ at (\S+)", heard=heard)


def with_nodes(
    deployment: Deployment,
    urls: Mapping[str, str],
    kvds: Mapping[str, KvdAt],
    relays: Mapping[str, str],
) -> Deployment:
    """The deployment as it runs: every node with its addresses."""

    def node(host: Host) -> Node:
        return Node(urls[host.name], kvds[host.name].url, relays.get(host.name))

    def placed(cluster: Cluster) -> Cluster:
        nodes = [node(host) for host in hosts(deployment) if host.cluster == cluster.name]
        return msgspec.structs.replace(cluster, nodes=nodes)

    clusters = [placed(cluster) for cluster in deployment.clusters]
    return msgspec.structs.replace(deployment, clusters=clusters)
