"""The host files, the gateway's section and the command lines of a new deployment. Pure.

Everything that a host needs lies in one folder, and its commands run in that folder: all paths are
relative to it.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

import msgspec

from prfaas.config.address import Address
from prfaas.config.gateway import ApiKey, GatewaySection
from prfaas.config.host import EmulatedSection, HostConfig, KvdSection, NodeSection
from prfaas.config.tls import TlsSection
from prfaas.config.write import sparse, toml
from prfaas.launch.new_deployment.answers import Answers, Instance, folder_name

CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"
MEMBER_KEY, OPERATOR_KEY, SALT = "member.key", "operator.key", "salt.key"
DEPLOYMENT = "deployment.toml"
CLIENT, OPERATOR = "client", "operator"  # folders for people
MODEL_FOLDER = "model"  # of the gateway: the model's configuration and tokenizer
TLS = TlsSection(ca=CA, cert=CERT, key=KEY)
_CERT_REQUIRED = "2"  # ssl.CERT_REQUIRED, as vLLM takes it


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
    lines = [
        f"# Instance {instance.name} of cluster {instance.cluster} on {instance.host}.",
        "# Paths are relative to this file. docs/configuration.md has every key.",
        "",
    ]
    return "\n".join(lines) + "\n" + toml(sparse(_host_config(answers, instance)))


def _host_config(answers: Answers, instance: Instance) -> HostConfig:
    listen = answers.listen_host(instance.host)
    differs = listen != instance.host
    data, http = answers.data_address(instance), answers.kvd_address(instance)
    node = answers.node_address(instance)
    socket = _socket(instance)
    return HostConfig(
        kvd=KvdSection(
            socket=socket,
            listen=str(Address(listen, data.port)),
            http=str(Address(listen, http.port)),
            memory=answers.memory,
            node=instance.name,
            advertise=instance.host if differs else None,
            cluster=instance.cluster,
            gateways=[answers.gateway_url],
            member_key_file=MEMBER_KEY,
            operator_key_file=OPERATOR_KEY,
            tls=TLS,
        ),
        node=NodeSection()
        if answers.engine == "vllm"
        else NodeSection(
            engine=answers.engine,
            model=answers.model,
            name=answers.name,
            host=listen,
            port=node.port,
            advertise=f"https://{node}" if differs else None,
            kvd_socket=socket,
            kvd_url=f"https://{http}",
            member_key_file=MEMBER_KEY,
            operator_key_file=OPERATOR_KEY,
            block_tokens=answers.block_tokens,
            tls=TLS,
            emulated=_emulated(answers, instance),
        ),
    )


def _emulated(answers: Answers, instance: Instance) -> EmulatedSection:
    hardware = answers.cluster(instance.cluster).hardware
    if answers.engine != "emulated" or hardware is None:
        return EmulatedSection()
    return EmulatedSection(
        accelerator=hardware.accelerator, gpus=hardware.gpus, catalog=answers.catalogs
    )


def _socket(instance: Instance) -> str:
    return f"kvd{instance.suffix}.sock"


def tenant_key_file(answers: Answers, tenant: str) -> str:
    return "tenant.key" if len(answers.tenants) == 1 else f"tenant-{tenant}.key"


def gateway_section(answers: Answers, base: GatewaySection) -> GatewaySection:
    """`base` with the address, the keys and the certificates of this deployment."""
    return msgspec.structs.replace(
        base,
        host=answers.listen_host(answers.gateway),
        port=answers.ports.gateway,
        keys=[ApiKey(file=tenant_key_file(answers, one), tenant=one) for one in answers.tenants],
        operator_key_file=OPERATOR_KEY,
        member_key_file=MEMBER_KEY,
        salt_file=SALT,
        insecure=False,
        tls=TLS,
    )


# Commands -----------------------------------------------------------------------------------------


def instance_commands(answers: Answers, instance: Instance) -> list[HostCommand]:
    file = host_file_name(instance)
    node = f"prfaas node --config {file}"
    if answers.engine == "vllm":
        node = _vllm_command(answers, instance)
    return [
        HostCommand(
            "kvd",
            f"prfaas kvd --config {file}",
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
        commands.append(
            HostCommand("gateway", f"prfaas gateway {DEPLOYMENT}", url=answers.gateway_url)
        )
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


def _vllm_command(answers: Answers, instance: Instance) -> str:
    """vLLM takes its API key from the environment: every user of the host can read a command
    line."""
    node = answers.node_address(instance)
    connector = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvd": _socket(instance), "url": f"https://{node}"},
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://vllm{instance.suffix}.events",
    }
    words = ["vllm", "serve", answers.model, "--served-model-name", answers.name]
    words += ["--host", answers.listen_host(instance.host), "--port", str(node.port)]
    words += ["--ssl-ca-certs", CA, "--ssl-certfile", CERT, "--ssl-keyfile", KEY]
    words += ["--ssl-cert-reqs", _CERT_REQUIRED, "--enable-prefix-caching"]
    words += ["--kv-transfer-config", json.dumps(connector)]
    words += ["--kv-events-config", json.dumps(events)]
    return f'VLLM_API_KEY="$(head -n 1 {MEMBER_KEY})" {shlex.join(words)}'
