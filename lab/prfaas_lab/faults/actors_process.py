"""Starts the process of the hostile actors beside a deployment, and reads its report."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from prfaas.errors import PeerError
from prfaas.interpreter import module_command
from prfaas.launch.attached_process import PROGRAM
from prfaas.launch.children import Child, Children, Command
from prfaas.launch.services.hosts import list_hosts
from prfaas_lab.faults.actors.situation import ActorName, ActorsReport, KvdPlace, Situation
from prfaas_lab.faults.credentials import HOSTILE_TENANT
from prfaas_lab.faults.deployment import FaultDeployment

NAME = "actors"
START_S = 60.0  # for imports on a busy machine


class ActorsProcess:
    """The running process. Its connections and its CPU are bounded by itself."""

    def __init__(self, child: Child[bool], report: Path) -> None:
        self._child = child
        self._report = report

    async def finish(self) -> ActorsReport:
        """Ends the actors. Raises `PeerError` when they left no report."""
        await self._child.end()
        try:
            return msgspec.json.decode(self._report.read_bytes(), type=ActorsReport)
        except (OSError, msgspec.MsgspecError) as error:
            raise PeerError(f"the actors left no report ({error}); see {self._child.log}") from None


@asynccontextmanager
async def running_actors(
    deployment: FaultDeployment,
    prefix: Sequence[str],
    actors: Sequence[ActorName],
    *,
    seed: int,
    with_faults: bool,
    only: Sequence[str] = (),
) -> AsyncIterator[ActorsProcess]:
    """Starts the actors. `prefix` as for `Children`; `only`: kinds of attack, none for all. Raises
    `ChildDied`."""
    folder = deployment.hosts.folder
    report = folder / f"{NAME}.json"
    situation = _situation(deployment, report, actors, seed, only, with_faults=with_faults)
    file = folder / f"{NAME}-situation.json"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)  # it holds keys
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(msgspec.json.encode(situation))
    arguments = [PROGRAM, *module_command("prfaas_lab.faults.actors", str(file))]
    # Not one of the deployment's children: their sockets and memory are measured.
    async with Children(folder, prefix) as children:
        child = await children.start(Command(NAME, arguments, _is_ready))
        async with asyncio.timeout(START_S):
            await child.ready()
        yield ActorsProcess(child, Path(situation.report))


def _is_ready(line: str) -> bool | None:
    return True if line.startswith('{"ready":') else None


def _situation(
    deployment: FaultDeployment,
    report: Path,
    actors: Sequence[ActorName],
    seed: int,
    only: Sequence[str],
    *,
    with_faults: bool,
) -> Situation:
    hosts, keys = deployment.hosts, deployment.access.credentials
    model = deployment.deployment.model
    return Situation(
        actors=list(actors),
        gateways=[target.url for target in deployment.targets],
        model=model.name,
        max_tokens=model.max_tokens,
        tenant_key=keys.tenants[HOSTILE_TENANT],
        member_key=keys.member,
        kvds=[
            KvdPlace(
                host.name, host.cluster, hosts.kvds[host.name].http, hosts.kvds[host.name].data
            )
            for host in list_hosts(deployment.deployment)
        ],
        engines=list(hosts.engine_urls.values()),
        borrows_names=not with_faults,
        seed=seed,
        report=str(report.resolve()),
        only=list(only),
    )
