"""Command lines of services: options of a command, or a file with them. Pure."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from prfaas.config.gateway import GatewayTimeouts
from prfaas.config.host import KvdSection, NodeSection
from prfaas.config.write import sparse

# Keys that the command has an option for. Every other key is given with `--set`.
_KVD = {
    "socket": "--socket",
    "node": "--node",
    "cluster": "--cluster",
    "memory": "--memory",
    "ssd": "--ssd",
    "listen": "--listen",
    "http": "--http",
}
_NODE = {
    "engine": "--engine",
    "model": "--model",
    "name": "--name",
    "host": "--host",
    "port": "--port",
    "kvd_socket": "--kvd",
    "kvd_url": "--kvd-url",
    "device": "--device",
    "emulated.accelerator": "--accelerator",
}


def kvd_words(section: KvdSection) -> list[str]:
    """The command with all settings as options."""
    return ["kvd", *_options(section, "kvd", _KVD)]


def node_words(section: NodeSection) -> list[str]:
    return ["node", *_options(section, "node", _NODE)]


def file_words(command: str, file: str, changes: Sequence[str] = ()) -> list[str]:
    """The command with a host file. `changes` are KEY=VALUE, and win over the file."""
    return [command, "--config", file, *(word for text in changes for word in ("--set", text))]


def gateway_words(
    file: str, cluster: str | None = None, timeouts: GatewayTimeouts | None = None
) -> list[str]:
    """`cluster`: the PD cluster whose requests arrive there; None: those of all. `timeouts` win
    over the file."""
    words = ["gateway", file]
    words += [] if cluster is None else ["--cluster", cluster]
    return words if timeouts is None else words + _options(timeouts, "gateway.timeouts", {})


def _options(section: msgspec.Struct, prefix: str, flags: Mapping[str, str]) -> list[str]:
    """The keys that differ from their defaults."""
    values = dict(flat(sparse(section)))
    words = [word for key, flag in flags.items() if key in values for word in (flag, values[key])]
    found = [str(word) for word in words]
    for key in sorted(values.keys() - flags.keys()):
        found += ["--set", f"{prefix}.{key}={as_value(values[key])}"]
    return found


def flat(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Values of nested tables, by dotted key."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from ((f"{key}.{below}", held) for below, held in flat(value))
        else:
            yield key, value


def as_value(value: Any) -> str:
    """A value as `--set` reads it: TOML, and a string without quotes where it is not TOML."""
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if not isinstance(value, str):
        return json.dumps(value)
    try:
        tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        return value
    return json.dumps(value)
