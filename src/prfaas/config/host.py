"""The file of one host: `[kvd]` for `prfaas kvd --config FILE`, `[node]` for `prfaas node`.

A host has one file, and each process reads its own section; the other section is validated too.
Paths are relative to the file. A flag or `--set KEY=VALUE` wins over the file. The string below a
field is its entry in docs/configuration.md (`make docs`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import msgspec

from prfaas.config.assignments import assign, set_key
from prfaas.config.fields import Amount, AmountOrZero, Count, CountOrZero, Port
from prfaas.config.strict import decode, parse_toml, read_text
from prfaas.config.tls import PATHS as TLS_PATHS
from prfaas.config.tls import TlsSection


class KvdTimeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a kvd waits for gateways, engines and other kvds."""

    grant_s: Amount = 60.0
    """A grant ends when no frame of its transfer has arrived for this long."""
    dispatch_s: Amount = 30.0
    """Time that a committed transfer waits for the decode engine to claim it."""
    remember_s: Amount = 120.0
    """Time for which the outcome of an ended transfer can be queried."""
    heartbeat_s: Amount = 2.0
    """Interval of the heartbeats to gateways."""
    gateway_call_s: Amount = 5.0
    """Time for a gateway's response to a heartbeat."""
    connect_s: Amount = 5.0
    """Time to connect to another kvd."""
    connection_silence_s: Amount = 10.0
    """A connection on which a frame is not acknowledged for this long is replaced."""
    transfer_stall_s: Amount = 30.0
    """An outgoing transfer without an acknowledgement for this long has failed."""
    leave_s: AmountOrZero = 0.0
    """Time after SIGTERM in which the kvd is not ready any more, but still grants transfers. A
    gateway that gets no grant uses another node at once, so the default is no time. SIGINT skips
    it."""
    drain_s: AmountOrZero = 30.0
    """Time after that in which running transfers may finish, and no new ones are granted."""


class KvdSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The KV store of a host (`prfaas kvd`)."""

    socket: str | None = None
    """Unix socket for the engines of this host. Required here or as `--socket`."""
    listen: str = "127.0.0.1:0"
    """HOST:PORT for KV from other hosts; port 0 lets the system choose a free one."""
    http: str = "127.0.0.1:0"
    """HOST:PORT of the HTTP API for gateways; port 0 lets the system choose a free one."""
    memory: str = "4GiB"
    """Shared memory for KV, of all forms together, for example 64GiB."""
    ssd: str | None = None
    """Folder for prefixes that memory cannot hold. Without it, there is no SSD tier."""
    ssd_size: str = "64GiB"
    """Size of the SSD tier, for example 1TB."""
    checkpoints: str = "default"
    """Where linear-attention state is kept along a prompt: default, last, branch or every:N, where
    N is in blocks."""
    node: str | None = None
    """Name of this kvd in cache events and at gateways. The default is its data address."""
    advertise: str | None = None
    """Host name or address at which other hosts reach this one."""
    via: str | None = None
    """HOST:PORT of a relay that senders use instead of `listen`."""
    cluster: str | None = None
    """Cluster of the deployment file that this host belongs to. Required with `gateways`."""
    gateways: list[str] = []
    """URLs of the gateways to register with."""
    member_key_file: str | None = None
    """File with the member key, which the gateways, nodes and kvds of a deployment share. With it,
    the HTTP API requires the key. Required to listen on more than loopback."""
    metrics_key_file: str | None = None
    """File with the metrics key, which opens `/metrics` and nothing else."""
    peers: list[str] = []
    """Hosts that KV may be sent to and pulled from: names, addresses or networks such as
    10.0.0.0/16. By default every host with a member key, and only this host without one."""
    insecure: bool = False
    """Whether this kvd may listen on more than loopback without a member key and TLS. Then every
    process that reaches it can read and replace KV."""
    connections: Count | None = None
    """TCP connections to each peer. The default is 4, or one for each worker process where there
    are more of them."""
    workers: CountOrZero | None = None
    """Processes that encrypt, check and move KV, so that this uses several cores; 0: the kvd does
    it itself. The default is half of the cores, at most 8, and none with fewer than 4 cores."""
    otlp_endpoint: str | None = None
    """URL of a collector that spans are sent to by OTLP over HTTP, for example
    http://localhost:4318; needs the extra `otel` ([tracing.md](tracing.md)). The default is that of
    the variable OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, if one is set.
    """
    credentials_poll_s: AmountOrZero = 0.0
    """Interval at which the files of keys and certificates are checked, and read again where they
    have changed; 0: only SIGHUP makes the process read them again."""
    tls: TlsSection = TlsSection()
    timeouts: KvdTimeouts = KvdTimeouts()


class EmulatedSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The emulated engine (`engine = "emulated"`): it follows a profile and computes nothing."""

    accelerator: str | None = None
    """Accelerator whose profile is followed. The default is the only one that the model has."""
    gpus: Count = 8
    """GPUs per emulated instance."""
    catalog: list[str] = []
    """Catalog files to add to the built-in catalog."""
    time_scale: Amount = 1.0
    """Factor for all times."""
    byte_scale: Amount = 1.0
    """Factor for the size of the model's state."""
    output_scale: Amount = 1.0
    """Factor for output lengths: one emulated token stands for 1 / output_scale tokens."""


class NodeTimeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a node waits."""

    drain_s: AmountOrZero = 30.0
    """Time in which running requests may finish, after the node has stopped accepting new ones."""
    leave_s: AmountOrZero = 2.5
    """Time after SIGTERM in which the node is not ready any more, but still accepts requests. It
    must be longer than two intervals of the gateways' polls (`gateway.timeouts.node_poll_s`).
    Gateways also copy hot prefixes away meanwhile. SIGINT skips it."""
    kvd_wait_s: AmountOrZero = 0.0
    """Time at the start in which the node waits for the kvd at `kvd_socket`, as where both are
    started together."""


class NodeSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An engine with vLLM's HTTP API (`prfaas node`)."""

    engine: Literal["hf", "emulated"] = "hf"
    """Engine: `hf` computes a Hugging Face checkpoint, `emulated` follows a profile."""
    model: str | None = None
    """Checkpoint folder, or for the emulated engine a model of the catalog. Required here or as
    `--model`."""
    name: str | None = None
    """Model name in the API. The default is the name of the folder or of the catalog's model."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on; 0 lets the system choose a free one."""
    advertise: str | None = None
    """URL at which gateways reach this node, where it differs from host and port."""
    kvd_socket: str | None = None
    """Socket of a running kvd. Without it, the node starts a kvd that ends with the node."""
    kvd_url: str | None = None
    """HTTP address of that kvd, which the node tells in `/v1/models`, for commands that are given
    the node's URL."""
    member_key_file: str | None = None
    """File with the member key, which the gateways, nodes and kvds of a deployment share. With it,
    the API requires the key. Required to listen on more than loopback."""
    metrics_key_file: str | None = None
    """File with the metrics key, which opens `/metrics` and nothing else."""
    insecure: bool = False
    """Whether this node may listen on more than loopback without a member key and TLS. Then every
    process that reaches it can use it."""
    device: str | None = None
    """Device of the hf engine: cpu, cuda or cuda:N. The default is the best that is present."""
    dtype: str | None = None
    """Number format of the hf engine: float32, bfloat16 or float16."""
    tokenizer: str | None = None
    """Checkpoint folder with the tokenizer. The default is the model's own (hf engine)."""
    block_tokens: Count = 64
    """Tokens per KV block."""
    chunk_tokens: Count | None = None
    """Tokens per prefill step. The default is the engine's choice."""
    max_running: Count | None = None
    """Sequences that decode together. The default is the engine's choice. Where a gateway has
    several tenants, one of them takes all but four (a quarter of fewer than 16)."""
    warm_up: list[Count] | None = None
    """Lengths of prompts, in tokens, that the engine runs before the node is ready, so that no
    request waits for kernels to be compiled. The default is the choice of the engine's device:
    lengths up to two prefill steps on a GPU, none on a CPU or for the emulated engine."""
    kernel_cache: str | None = None
    """Folder in which the hf engine keeps compiled kernels for the next start, and bytecode of
    libraries that have none. It must belong to the user of the node, and other users must not be
    able to write to it. The default is prfaas/kernels in the user's cache folder
    (`$XDG_CACHE_HOME` or `~/.cache`)."""
    keep_answers: bool = True
    """Whether the state of an answer is kept when the answer ends, so that the next prompt of the
    conversation resumes from it. The kvd sets at most 1/32 of its memory aside for this."""
    max_waiting: Count = 256
    """Requests in the engine's queue. Further requests are refused with status 503."""
    otlp_endpoint: str | None = None
    """URL of a collector that spans are sent to by OTLP over HTTP, for example
    http://localhost:4318; needs the extra `otel` ([tracing.md](tracing.md)). A kvd
    that the node starts sends its spans there, too. The default is that of the variable
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, if one is set."""
    credentials_poll_s: AmountOrZero = 0.0
    """Interval at which the files of keys and certificates are checked, and read again where they
    have changed; 0: only SIGHUP makes the process read them again."""
    tls: TlsSection = TlsSection()
    emulated: EmulatedSection = EmulatedSection()
    timeouts: NodeTimeouts = NodeTimeouts()


class HostConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file given with `--config`."""

    kvd: KvdSection = KvdSection()
    node: NodeSection = NodeSection()


# Keys whose value is a path. They are resolved here, where the file's folder is known.
_PATHS: dict[str, tuple[str, ...]] = {
    "kvd": ("socket", "ssd", "member_key_file", "metrics_key_file"),
    "kvd.tls": TLS_PATHS,
    "node": ("kvd_socket", "member_key_file", "metrics_key_file", "tokenizer", "kernel_cache"),
    "node.tls": TLS_PATHS,
}


def load_host_config(
    file: Path | None, assignments: Iterable[str] = (), flags: dict[str, Any] | None = None
) -> HostConfig:
    """The file's values, then those of `--set`, then those of flags (by dotted key; None: absent).
    Each later one wins."""
    raw: dict[str, Any] = {}
    if file is not None:
        raw = parse_toml(read_text(file), file)
        decode(raw, HostConfig, file)  # so that a mistake is reported as one of the file
        _resolve_paths(raw, file.parent)
    for text in assignments:
        assign(raw, text)
    for key, value in (flags or {}).items():
        if value is not None and value != ():
            set_key(raw, key, list(value) if isinstance(value, tuple) else value)
    return decode(raw, HostConfig, "")


def _resolve_paths(raw: dict[str, Any], folder: Path) -> None:
    for section, keys in _PATHS.items():
        at = raw
        for part in section.split("."):
            at = at.get(part, {})
        for key in keys:
            if key in at:
                at[key] = str(folder / at[key])
    node = raw.get("node", {})
    emulated = node.get("emulated", {})
    if "catalog" in emulated:
        emulated["catalog"] = [str(folder / path) for path in emulated["catalog"]]
    # A model of the catalog is a name, not a path.
    if "model" in node and (folder / node["model"]).exists():
        node["model"] = str(folder / node["model"])
