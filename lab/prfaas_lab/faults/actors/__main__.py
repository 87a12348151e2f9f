"""`python -m prfaas_lab.faults.actors FILE`: all hostile actors, until SIGTERM.

FILE is a `Situation` in JSON. The report is written at the end, into the file that the situation
names.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from prfaas_lab.faults.actors.budget import CpuBudget
from prfaas_lab.faults.actors.connections import Network
from prfaas_lab.faults.actors.grants import Grants
from prfaas_lab.faults.actors.lanes import Lane, run_lanes
from prfaas_lab.faults.actors.member import HostileMember
from prfaas_lab.faults.actors.peer_commands import PeerCommands
from prfaas_lab.faults.actors.peer_frames import PeerFrames
from prfaas_lab.faults.actors.situation import ActorName, ActorsReport, Census, Situation
from prfaas_lab.faults.actors.tenant import HostileTenant

END_S = 4.0  # for each part of the end; the soak kills the process after 10 s
READY = '{"ready":"actors"}'


async def run(situation: Situation) -> ActorsReport:
    """Runs until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    budget, census = CpuBudget(), Census()
    network = Network(budget, census)
    tenant = HostileTenant(
        network,
        situation.gateways,
        situation.tenant_key,
        situation.model,
        situation.max_tokens,
    )
    member = HostileMember(network, situation)
    grants = Grants(network, situation.member_key, situation.kvds)
    peer = PeerCommands(network, situation.member_key, situation.kvds, grants)
    frames = PeerFrames(network, situation.kvds, grants)

    def chosen(lanes: list[Lane]) -> list[Lane]:
        return [lane for lane in lanes if not situation.only or lane.kind in situation.only]

    tenant.prepare()
    member.prepare()
    peer.prepare()
    budget.restart()
    began_s = time.monotonic()
    runs: dict[ActorName, Coroutine[Any, Any, None]] = {
        "tenant": run_lanes(chosen(tenant.lanes), network, f"{situation.seed} tenant"),
        "member": member.run(),
        "peer": run_lanes(chosen([*peer.lanes, *frames.lanes]), network, f"{situation.seed} peer"),
    }
    running = [asyncio.create_task(run) for name, run in runs.items() if name in situation.actors]
    for name, run in runs.items():
        if name not in situation.actors:
            run.close()
    sys.stdout.write(f"{READY}\n")
    sys.stdout.flush()
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({stopping, *running}, return_when=asyncio.FIRST_COMPLETED)
    for task in running:
        if task.done() and not task.cancelled():  # an actor ends only by a defect of its own
            census.record_failure("actors", task.exception() or RuntimeError("an actor has ended"))
        task.cancel()
    await asyncio.wait(running, timeout=END_S)
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            await grants.abort_all()
    return ActorsReport(
        round(time.monotonic() - began_s, 1),
        round(budget.used_share, 3),
        dict(sorted(census.deeds.items())),
        census.failures,
    )


def main(file: Path) -> None:
    situation = msgspec.json.decode(file.read_bytes(), type=Situation)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        report = runner.run(run(situation))
    Path(situation.report).write_bytes(msgspec.json.encode(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
