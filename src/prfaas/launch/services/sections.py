"""The settings of a kvd, a node and a gateway: the one place that decides them. Pure."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from prfaas.config.gateway import ApiKey, GatewaySection
from prfaas.config.host import EmulatedSection, HostConfig, KvdSection, NodeSection
from prfaas.config.tls import TlsSection
from prfaas.launch.services.hosts import EngineSpec, Host
from prfaas.launch.services.places import Credentials, HostPlace


def host_config(host: Host, engines: EngineSpec, place: HostPlace) -> HostConfig:
    """Both sections. A vLLM server has options of its own instead of a `[node]` section."""
    node = NodeSection() if engines.kind == "vllm" else node_section(host, engines, place)
    return HostConfig(kvd_section(host, engines, place), node)


def kvd_section(host: Host, engines: EngineSpec, place: HostPlace) -> KvdSection:
    keys = place.credentials
    section = KvdSection(
        socket=place.socket,
        listen=place.kvd_listen,
        http=place.kvd_http,
        memory=engines.memory,
        node=place.name,
        advertise=place.advertise,
        cluster=host.cluster,
        gateways=list(place.gateways),
        member_key_file=keys.member_key if keys else None,
        metrics_key_file=keys.metrics_key if keys else None,
        workers=place.kvd_workers,
        credentials_poll_s=place.credentials_poll_s,
        tls=keys.tls if keys else TlsSection(),
        timeouts=place.kvd_timeouts,
    )
    if engines.ssd_size is None or place.ssd is None:
        return section
    return msgspec.structs.replace(section, ssd=place.ssd, ssd_size=engines.ssd_size)


def node_section(host: Host, engines: EngineSpec, place: HostPlace) -> NodeSection:
    assert engines.kind != "vllm", "`prfaas node` does not serve with vLLM"
    keys = place.credentials
    emulated = engines.kind == "emulated"
    tokenizer = engines.tokenizer if emulated else None  # a checkpoint has its own
    return NodeSection(
        engine=engines.kind,
        model=engines.model,
        name=engines.name,
        host=place.node_host,
        port=place.node_port,
        advertise=place.node_url if place.advertise_node else None,
        kvd_socket=place.socket,
        kvd_url=place.kvd_url,
        member_key_file=keys.member_key if keys else None,
        metrics_key_file=keys.metrics_key if keys else None,
        device=None if emulated else engines.device,
        tokenizer=None if tokenizer is None else str(tokenizer),
        block_tokens=engines.block_tokens,
        credentials_poll_s=place.credentials_poll_s,
        tls=keys.tls if keys else TlsSection(),
        emulated=_emulated(host, engines) if emulated else EmulatedSection(),
        timeouts=place.node_timeouts,
    )


def _emulated(host: Host, engines: EngineSpec) -> EmulatedSection:
    if not host.accelerator:
        return EmulatedSection()
    catalog = [str(path) for path in engines.catalog]
    return EmulatedSection(accelerator=host.accelerator, gpus=host.gpus, catalog=catalog)


def gateway_section(
    base: GatewaySection,
    host: str,
    port: int,
    credentials: Credentials,
    tenant_keys: Mapping[str, str],
    salt: str,
) -> GatewaySection:
    """`base` with this address and these credentials. `tenant_keys` are files by tenant."""
    return msgspec.structs.replace(
        base,
        host=host,
        port=port,
        keys=[ApiKey(file=file, tenant=tenant) for tenant, file in tenant_keys.items()],
        operator_key_file=credentials.operator_key,
        metrics_key_file=credentials.metrics_key,
        member_key_file=credentials.member_key,
        salt_file=salt,
        insecure=False,
        tls=credentials.tls,
    )
