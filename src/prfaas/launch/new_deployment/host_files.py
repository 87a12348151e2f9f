"""The host files, the gateway's section and the command lines of a new deployment. Pure.

Everything that a host needs lies in one folder, and its commands run in that folder: all paths are
relative to it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import msgspec

from prfaas.config.address import Address
from prfaas.config.gateway import GatewaySection
from prfaas.launch.new_deployment.answers import Answers, Instance, folder_name
from prfaas.launch.services import sections
from prfaas.launch.services.builders import (
    HostFile,
    engine_service,
    gateway_service,
    kvd_service,
)
from prfaas.launch.services.hosts import EngineSpec, Host
from prfaas.launch.services.places import (
    CA,
    CERT,
    DEPLOYMENT,
    KEY,
    MEMBER_KEY,
    OPERATOR_KEY,
    SALT,
    HostPlace,
    credentials_in,
)
from prfaas.launch.services.service import Service

CLIENT, OPERATOR = "client", "operator"  # folders for people
_CREDENTIALS = credentials_in()


class HostCommand(msgspec.Struct, frozen=True):
    """A process of a host, as a shell runs it in the host's folder."""

    service: str  # kvd, node or gateway
    command: str
    name: str = ""  # of the instance
    url: str = ""  # at which other hosts reach it


class HostSummary(msgspec.Struct, frozen=True):
    host: str
    folder: str  # with all files of the host
    copy: str  # the command that copies the folder
    commands: list[HostCommand]  # in the order in which they are started


def host_file_name(instance: Instance) -> str:
    return f"host{instance.suffix}.toml"


def host_file(answers: Answers, instance: Instance) -> str:
    """The host file of one instance."""
    return _kvd(answers, instance).files[host_file_name(instance)]


def _kvd(answers: Answers, instance: Instance) -> Service:
    host, place = _host(answers, instance), _place(answers, instance)
    return kvd_service(host, _engines(answers), place, _file(instance))


def _engine(answers: Answers, instance: Instance) -> Service:
    host, place = _host(answers, instance), _place(answers, instance)
    return engine_service(host, _engines(answers), place, _file(instance))


def _file(instance: Instance) -> HostFile:
    heading = (
        f"# Instance {instance.name} of cluster {instance.cluster} on {instance.host}.\n"
        "# Paths are relative to this file. docs/configuration.md has every key.\n\n"
    )
    return HostFile(host_file_name(instance), heading=heading)


def _host(answers: Answers, instance: Instance) -> Host:
    hardware = answers.cluster(instance.cluster).hardware
    accelerator, gpus = (hardware.accelerator, hardware.gpus) if hardware else ("", 0)
    return Host(instance.name, instance.cluster, accelerator, gpus)


def _engines(answers: Answers) -> EngineSpec:
    return EngineSpec(
        answers.engine,
        answers.model,
        answers.name,
        answers.memory,
        answers.block_tokens,
        [Path(name) for name in answers.catalogs],
    )


def _place(answers: Answers, instance: Instance) -> HostPlace:
    listen = answers.listen_host(instance.host)
    differs = listen != instance.host
    http, node = answers.kvd_address(instance), answers.node_address(instance)
    return HostPlace(
        name=instance.name,
        socket=f"kvd{instance.suffix}.sock",
        events=f"vllm{instance.suffix}.events",
        kvd_listen=str(Address(listen, answers.data_address(instance).port)),
        kvd_http=str(Address(listen, http.port)),
        advertise=instance.host if differs else None,
        kvd_url=f"https://{http}",
        node_host=listen,
        node_port=node.port,
        node_url=f"https://{node}",
        advertise_node=differs,
        gateways=(answers.gateway_url,),
        credentials=_CREDENTIALS,
    )


def tenant_key_file(answers: Answers, tenant: str) -> str:
    return "tenant.key" if len(answers.tenants) == 1 else f"tenant-{tenant}.key"


def gateway_section(answers: Answers, base: GatewaySection) -> GatewaySection:
    """`base` with the address, the keys and the certificates of this deployment."""
    return sections.gateway_section(
        base,
        answers.listen_host(answers.gateway),
        answers.ports.gateway,
        _CREDENTIALS,
        {tenant: tenant_key_file(answers, tenant) for tenant in answers.tenants},
        SALT,
    )


# Commands -----------------------------------------------------------------------------------------


def instance_commands(answers: Answers, instance: Instance) -> list[HostCommand]:
    node = _line(_engine(answers, instance))
    if answers.engine == "vllm":
        # vLLM takes its API key from the environment: every user of the host can read a command
        # line.
        node = f'VLLM_API_KEY="$(head -n 1 {MEMBER_KEY})" {node}'
    return [
        HostCommand(
            "kvd",
            _line(_kvd(answers, instance)),
            instance.name,
            f"https://{answers.kvd_address(instance)}",
        ),
        HostCommand("node", node, instance.name, f"https://{answers.node_address(instance)}"),
    ]


def summarise_host(
    answers: Answers, host: str, folder: str, instances: Sequence[Instance]
) -> HostSummary:
    """The commands of these instances on a host; with all instances also that of the gateway.
    `folder` holds the files of the deployment. Where the host has had its files before, only those
    of the instances are copied."""
    commands = [
        command
        for one in instances
        if one.host == host
        for command in instance_commands(answers, one)
    ]
    if host == answers.gateway and list(instances) == answers.instances:
        commands.append(HostCommand("gateway", _line(_gateway(answers)), url=answers.gateway_url))
    at = f"{folder}/hosts/{folder_name(host)}"
    copy = shlex.join(["scp", "-rp", at, _copied(host)])
    new = [host_file_name(one) for one in instances if one.host == host]
    has_others = any(one.host == host and one not in instances for one in answers.instances)
    if has_others or (host == answers.gateway and list(instances) != answers.instances):
        # `scp -r` would put the folder into the one that is there.
        files = [f"{at}/{name}" for name in (*new, *answers.catalogs)]
        copy = shlex.join(["scp", "-p", *files, f"{_copied(host)}/"])
    return HostSummary(host, at, copy, commands)


def copy_certificate_command(host: str, folder: str) -> str:
    """The command that copies a renewed certificate to its host."""
    at = f"{folder}/hosts/{folder_name(host)}"
    return shlex.join(["scp", "-p", f"{at}/{CERT}", f"{at}/{KEY}", f"{_copied(host)}/"])


def _copied(host: str) -> str:
    """The folder on the host, as `scp` names it."""
    return f"[{host}]:prfaas" if ":" in host else f"{host}:prfaas"


def request_command(answers: Answers, folder: str, *, text: bool) -> str:
    """A `curl` line that sends a request."""
    prompt: str | list[int] = "Once upon a time" if text else [1, 2, 3, 4]
    body = json.dumps({"model": answers.name, "prompt": prompt, "max_tokens": 16})
    key = tenant_key_file(answers, answers.tenants[0])
    line = _curl(f"{folder}/{CLIENT}", key, f"{answers.gateway_url}/v1/completions")
    return f"{line} -H 'Content-Type: application/json' -d {shlex.quote(body)}"


def state_command(answers: Answers, folder: str) -> str:
    """A `curl` line that shows the deployment's state."""
    return _curl(f"{folder}/{OPERATOR}", OPERATOR_KEY, f"{answers.gateway_url}/prfaas/v1/state")


def _curl(at: str, key_file: str, url: str) -> str:
    # A key file has one key per line; the first is the one to send.
    key = f'"Authorization: Bearer $(head -n 1 {shlex.quote(f"{at}/{key_file}")})"'
    # curl treats brackets as a pattern without -g.
    return f"curl -g --cacert {shlex.quote(f'{at}/{CA}')} -H {key} {shlex.quote(url)}"


def _gateway(answers: Answers) -> Service:
    return gateway_service(DEPLOYMENT, gateway_section(answers, GatewaySection()))


def _line(service: Service) -> str:
    return shlex.join([service.program, *service.words])
