from __future__ import annotations

from collections.abc import Iterator
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
from tests.node.hosts import Host, call

EMULATED = (
    *("--engine", "emulated", "--model", "case-study-1t", "--gpus", "8"),
    *("--byte-scale", "1e-4"),
)
QUICK = (*EMULATED, "--time-scale", "0.02")
# Longer than any test waits: a time limit does not release what a gateway should have released.
KEEPS = ("--grant-s", "600", "--dispatch-s", "600")


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


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts at home, one far away. Tests leave them healthy."""
    folder = tmp_path_factory.mktemp("hosts")
    save_tokenizer(folder, max_tokens=131072)  # for chats, which decode nodes read themselves
    options = (*QUICK, "--tokenizer", str(folder))
    home = [
        Host(
            folder / f"home{i}", (*options, "--accelerator", "h20"), ("--node", f"home{i}", *KEEPS)
        )
        for i in range(3)
    ]
    far = [Host(folder / "far", (*options, "--accelerator", "h200"), ("--node", "far0", *KEEPS))]
    hosts = Hosts(folder, home, far)
    try:
        for host in hosts.all:
            host.wait_until_ready()
        yield hosts
    finally:
        for host in hosts.all:
            host.close()


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
