"""The services of a host, and the gateway: `Service` from settings and a place. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from prfaas.config.address import parse_address
from prfaas.config.deployment import Link
from prfaas.config.gateway import GatewaySection, GatewayTimeouts
from prfaas.config.write import sparse, toml
from prfaas.launch.services.hosts import EngineSpec, Host
from prfaas.launch.services.places import (
    CA,
    CERT,
    KEY,
    MEMBER_KEY,
    METRICS_KEY,
    OPERATOR_KEY,
    SALT,
    HostPlace,
)
from prfaas.launch.services.sections import host_config, kvd_section, node_section
from prfaas.launch.services.service import Service
from prfaas.launch.services.vllm import vllm_options
from prfaas.launch.services.words import (
    as_value,
    file_words,
    flat,
    gateway_words,
    kvd_words,
    node_words,
)

MEMBER_SECRETS = (CA, CERT, KEY, MEMBER_KEY, METRICS_KEY)
KVD_DATA, HTTP = "kv", "http"  # names of ports
_LIVE, _READY = "/live", "/ready"
_VLLM_HEALTH = "/health"  # it has no other path for probes


class HostFile(msgspec.Struct, frozen=True):
    """The file of a host's settings. Keys of `options` are left out of it and given on the command
    line, because they differ between hosts that share one file."""

    path: str  # as the command line names it
    options: tuple[str, ...] = ()
    heading: str = ""  # comment lines at its top

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


def host_file(host: Host, engines: EngineSpec, place: HostPlace, file: HostFile) -> str:
    """The text of the file: the settings of the kvd and of the node."""
    table = sparse(host_config(host, engines, place))
    return file.heading + toml(_without(table, file.options))


def kvd_service(
    host: Host, engines: EngineSpec, place: HostPlace, file: HostFile | None = None
) -> Service:
    """Without a file, all settings are options of the command."""
    section = kvd_section(host, engines, place)
    words = kvd_words(section)
    if file is not None:
        words = file_words("kvd", file.path, _changes("kvd", section, file.options))
    return Service(
        name=f"kvd-{host.name}",
        kind="kvd",
        cluster=host.cluster,
        host=host.name,
        words=(*words, *engines.options),
        ports={
            KVD_DATA: parse_address(section.listen, "kvd.listen", any_port=True).port,
            HTTP: parse_address(section.http, "kvd.http", any_port=True).port,
        },
        files={} if file is None else {file.name: host_file(host, engines, place, file)},
        secrets=MEMBER_SECRETS if place.credentials else (),
        probe_port=HTTP,
        live_path=_LIVE,
        ready_path=_READY,
        leave_s=section.timeouts.leave_s,
        drain_s=section.timeouts.drain_s,
    )


def engine_service(
    host: Host, engines: EngineSpec, place: HostPlace, file: HostFile | None = None
) -> Service:
    """`prfaas node`, or a vLLM server."""
    service = Service(
        name=host.name,
        kind="engine",
        cluster=host.cluster,
        host=host.name,
        words=(),
        ports={HTTP: place.node_port},
        secrets=MEMBER_SECRETS if place.credentials else (),
        probe_port=HTTP,
        live_path=_LIVE,
        ready_path=_READY,
        after=(f"kvd-{host.name}",),
        leave_s=place.node_timeouts.leave_s,
        drain_s=place.node_timeouts.drain_s,
    )
    if engines.kind == "vllm":
        return msgspec.structs.replace(
            service,
            program="vllm",
            words=("serve", engines.model, *vllm_options(engines, place)),
            environment=place.engine_environment,
            live_path=_VLLM_HEALTH,
            ready_path=_VLLM_HEALTH,
        )
    section = node_section(host, engines, place)
    words = node_words(section)
    if file is not None:
        words = file_words("node", file.path, _changes("node", section, file.options))
    files = {} if file is None else {file.name: host_file(host, engines, place, file)}
    return msgspec.structs.replace(service, words=(*words, *engines.options), files=files)


def relay_service(name: str, link: Link, targets: Sequence[str]) -> Service:
    """An emulated WAN to the data ports of the kvds of a cluster."""
    words = ["wan", "--control", "--gbps", f"{link.gbps:g}", "--rtt-ms", f"{link.rtt_ms:g}"]
    for target in targets:
        words += ["--listen", "127.0.0.1:0", "--to", target]
    return Service(name=name, kind="relay", cluster=link.source, host=name, words=tuple(words))


# limits: everything that differs between the gateways of a machine and of a cluster.
def gateway_service(
    file: str,
    section: GatewaySection,
    *,
    name: str = "gateway",
    cluster: str | None = None,
    timeouts: GatewayTimeouts | None = None,
    options: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
    after: Sequence[str] = (),
) -> Service:
    """`cluster`: the PD cluster whose requests arrive there; None: those of all. `timeouts` win
    over those of the file, whose section is given."""
    used = timeouts or section.timeouts
    keys = [key.file.rpartition("/")[2] for key in section.keys if key.file is not None]
    return Service(
        name=name,
        kind="gateway",
        cluster=cluster or "",
        host=name,
        words=(*gateway_words(file, cluster, timeouts), *options),
        ports={HTTP: section.port},
        files=dict(files or {}),
        secrets=(*MEMBER_SECRETS, OPERATOR_KEY, SALT, *keys) if section.tls.cert else (),
        probe_port=HTTP,
        live_path=_LIVE,
        ready_path=_READY,
        after=tuple(after),
        leave_s=used.leave_s,
        drain_s=used.drain_s,
    )


def _changes(prefix: str, section: msgspec.Struct, keys: Collection[str]) -> list[str]:
    values = {f"{prefix}.{key}": value for key, value in flat(sparse(section))}
    return [f"{key}={as_value(values[key])}" for key in keys if key in values]


def _without(
    table: Mapping[str, object], keys: Collection[str], prefix: str = ""
) -> dict[str, object]:
    found: dict[str, object] = {}
    for key, value in table.items():
        if prefix + key in keys:
            continue
        found[key] = (
            _without(value, keys, f"{prefix}{key}.") if isinstance(value, Mapping) else value
        )
    return found
