from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from prfaas.config.address import Address, parse_address
from prfaas.config.deployment import Deployment
from prfaas.engine.checkpoint.tokenizer import save_tokenizer
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from tests.gateway.backends import deployment, node
from tests.node.hosts import Host, call, running_hosts

EMULATED = (
    *("--engine", "emulated", "--model", "case-study-1t"),
    *("--set", "node.emulated.byte_scale=1e-4"),
)
QUICK = (*EMULATED, "--set", "node.emulated.time_scale=0.02")
# Longer than any test waits: a time limit does not release what a gateway should have released.
KEEPS = ("--set", "kvd.timeouts.grant_s=600", "--set", "kvd.timeouts.dispatch_s=600")


@dataclass(frozen=True, slots=True)
class Hosts:
    tokenizer: Path
    home: list[Host]
    far: list[Host]

    @property
    def all(self) -> list[Host]:
        return [*self.home, *self.far]

    def deployment(self, **scheduler: Any) -> Deployment:
        return deployment([node(h) for h in self.home], [node(h) for h in self.far], **scheduler)

    def named(self, name: str) -> Host:
        return next(host for host in self.all if host.stats(check=False)["node"] == name)

    def forget_roles(self) -> None:
        """A gateway keeps the roles it finds, and these may be another deployment's."""
        for host in self.all:
            role = host.stats(check=False)["role"]
            status, _ = call("POST", f"{host.kvd_url}/v1/role", {**role, "role": "both"})
            assert status == 200

    def wait_until_idle(self) -> None:
        for host in self.all:
            host.wait_until_idle()


def on_accelerators(options: Sequence[str], *, home: int) -> dict[str, tuple[str, ...]]:
    """Options of nodes by name: so many at home, and one far away."""
    near = {f"home{number}": (*options, "--accelerator", "h20") for number in range(home)}
    return {**near, "far0": (*options, "--accelerator", "h200")}


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts at home, one far away. Tests leave them healthy."""
    folder = tmp_path_factory.mktemp("hosts")
    save_tokenizer(folder, max_tokens=131072)  # for chats, which decode nodes read themselves
    options = (*QUICK, "--set", f"node.tokenizer={folder}")
    with running_hosts(folder, on_accelerators(options, home=3), *KEEPS) as hosts:
        yield Hosts(folder, hosts[:3], hosts[3:])


@pytest.fixture
def unassigned(emulated: Hosts) -> Iterator[Hosts]:
    """The same, for deployments of another split."""
    emulated.forget_roles()
    yield emulated
    emulated.forget_roles()


@pytest.fixture
def relays(emulated: Hosts) -> Iterator[list[Relay]]:
    """One in front of the data port of every kvd at home."""
    with ExitStack() as stack:
        relays = []
        for host in emulated.home:
            data = parse_address(host.stats(check=False)["data_address"], "data_address")
            relay = Relay(Address("127.0.0.1", 0), data, Conditions())
            relays.append(stack.enter_context(closing(relay)).start())
        yield relays


def through(relays: list[Relay], emulated: Hosts) -> list[dict[str, str]]:
    """The nodes at home, which senders reach through the relays."""
    return [
        {**node(host), "via": str(relay.address)}
        for host, relay in zip(emulated.home, relays, strict=True)
    ]
