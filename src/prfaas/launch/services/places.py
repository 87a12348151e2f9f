"""Where the services of a host find their files, and where they are reached. Pure.

The same service runs as a process of this machine (`prfaas up`), by hand on a host of its own
(`prfaas init`) and as a container (`prfaas render kubernetes`). Only its place differs.
"""

from __future__ import annotations

import msgspec

from prfaas.config.host import KvdSection, KvdTimeouts, NodeSection, NodeTimeouts
from prfaas.config.tls import TlsSection

CA, CERT, KEY = "ca.pem", "cert.pem", "key.pem"
MEMBER_KEY, OPERATOR_KEY, METRICS_KEY = "member.key", "operator.key", "metrics.key"
SALT = "salt.key"
DEPLOYMENT = "deployment.toml"
MODEL_FOLDER = "model"  # of the gateway: the model's configuration and tokenizer


class Credentials(msgspec.Struct, frozen=True):
    """The files of a host's credentials, as its services name them. Only the gateway's host has the
    operator key."""

    tls: TlsSection
    member_key: str
    operator_key: str
    metrics_key: str


def credentials_in(folder: str = "", server_name: str | None = None) -> Credentials:
    """The credentials with their usual names. `folder` ends with a slash, or is empty."""
    files = TlsSection(ca=f"{folder}{CA}", cert=f"{folder}{CERT}", key=f"{folder}{KEY}")
    if server_name is not None:
        files = msgspec.structs.replace(files, server_name=server_name)
    keys = [f"{folder}{name}" for name in (MEMBER_KEY, OPERATOR_KEY, METRICS_KEY)]
    return Credentials(files, *keys)


class HostPlace(msgspec.Struct, frozen=True, kw_only=True):
    """The place of one kvd and its engine. A port of 0 lets the system choose one."""

    name: str  # of the kvd at gateways
    socket: str  # between engine and kvd
    events: str = ""  # vLLM's socket of KV events
    kvd_listen: str = KvdSection().listen
    kvd_http: str = KvdSection().http
    advertise: str | None = None  # host at which others reach the kvd, where it differs
    kvd_url: str | None = None
    node_host: str = NodeSection().host
    node_port: int = 0
    node_url: str | None = None  # at which gateways reach the engine
    advertise_node: bool = False  # whether `node_url` differs from host and port
    engine_options: tuple[str, ...] = ()  # of a vLLM server, after all others
    engine_environment: dict[str, str] = {}  # of a vLLM server
    ssd: str | None = None  # folder of the SSD tier
    gateways: tuple[str, ...] = ()  # to register with
    credentials: Credentials | None = None
    credentials_poll_s: float = 0.0
    kvd_workers: int | None = None
    kvd_timeouts: KvdTimeouts = KvdTimeouts()
    node_timeouts: NodeTimeouts = NodeTimeouts()
