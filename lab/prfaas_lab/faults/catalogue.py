"""The catalogue of faults: when each one strikes, which process, how, and how it is repaired.

A fault waits until a process is in the right state. A strike returns the function that repairs it.
The campaign runs all faults; the soak draws from them at random.
"""

from __future__ import annotations

import asyncio
import re
import resource
import signal
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from prfaas.cache.hashing import block_hashes
from prfaas.errors import PeerError
from prfaas_lab.faults.deployment import LOOK_S, FaultDeployment
from prfaas_lab.faults.questions import Verdict
from prfaas_lab.faults.worker_processes import send_signal, workers_of

Mend: TypeAlias = Callable[[], Awaitable[None]]
Victim: TypeAlias = Callable[[FaultDeployment], Awaitable[str | None]]
Part: TypeAlias = Literal["far", "decode", "gateway", "wan", "store", "clock"]
Strike: TypeAlias = Callable[[FaultDeployment, str], Awaitable[Mend]]

SLOW = 0.01  # of the WAN's rate
CRAWL = 0.005  # of the WAN's rate, so that a transfer lasts until its sender is killed
DAMAGED_CHUNKS = 20
JUMP_S = 3600.0
TOKENS = 8
_BREAK = frozenset({Verdict.BROKEN})
STREAMED_TOKENS = 60  # an answer of this length streams for seconds
FILLER_TOKENS = 65_536  # of the longest grants that fill an arena
_RUNNING = re.compile(r"^vllm:num_requests_running{[^}]*} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    what: str  # description for the reports
    part: Part  # of the deployment; a soak does not strike a part that is being repaired
    victim: Victim  # finds the process to strike; None while no process is in the right state
    strike: Strike
    lasts_s: float = 0.0  # until the repair; a service manager restarts a killed process at once
    crawls: bool = False  # slow the WAN until the strike, so that the right state lasts
    # Verdicts that requests in flight may get beside RIGHT, those whose own gateway or decode node
    # is down meanwhile.
    may: frozenset[Verdict] = frozenset()
    tokens: int = TOKENS  # of each answer in flight


# Victims ------------------------------------------------------------------------------------------


async def anytime(deployment: FaultDeployment) -> str | None:
    return deployment.names[0]


async def prefilling(deployment: FaultDeployment) -> str | None:
    """A PrfaaS node, while it computes a prefill."""
    return await first_with(
        deployment.layout.remotes, partial(_has_outgoing, deployment, "writing")
    )


async def sending(deployment: FaultDeployment) -> str | None:
    """A PrfaaS node, after it has computed a prefill and while its kvd still sends."""
    return await first_with(
        deployment.layout.remotes, partial(_has_outgoing, deployment, "sending")
    )


async def _has_outgoing(deployment: FaultDeployment, state: str, name: str) -> bool:
    return bool((await deployment.stats(name))["outgoing"][state])


async def awaiting(deployment: FaultDeployment) -> str | None:
    """A decode node that is receiving state: no token of that request has been sent."""

    async def receives(name: str) -> bool:
        return bool((await deployment.stats(name))["incoming"]["granted"])

    return await first_with(await deployment.with_role("decode"), receives)


async def receiving(deployment: FaultDeployment) -> str | None:
    """A decode node that is receiving state which the kvd of a PrfaaS node is sending."""
    return await awaiting(deployment) if await sending(deployment) is not None else None


async def decoding(deployment: FaultDeployment) -> str | None:
    """A decode node that generates, and no longer holds the transferred state."""

    async def generates(name: str) -> bool:
        incoming = (await deployment.stats(name))["incoming"]
        return await running(deployment, name) and not incoming["attached"]

    return await first_with(await deployment.with_role("decode"), generates)


async def first_with(
    names: Sequence[str], condition: Callable[[str], Awaitable[bool]]
) -> str | None:
    """The first node that fulfils the condition. One that does not respond does not: another fault
    may have struck it."""
    for name in names:
        with suppress(PeerError):
            if await condition(name):
                return name
    return None


async def running(deployment: FaultDeployment, name: str) -> bool:
    found = _RUNNING.search(await deployment.text(f"{deployment.node(name).url}/metrics"))
    return found is not None and float(found[1]) > 0


async def a_gateway(deployment: FaultDeployment) -> str | None:
    """A gateway that has requests in flight."""
    for number, name in enumerate(deployment.gateways):
        if (await deployment.state(number))["requests"]["in_flight"]:
            return name
    return None


# Strikes ------------------------------------------------------------------------------------------


async def killed(deployment: FaultDeployment, name: str) -> Mend:
    await deployment.kill(name)
    return partial(deployment.restart, name)


async def kvd_killed(deployment: FaultDeployment, name: str) -> Mend:
    return await killed(deployment, f"kvd-{name}")


async def frozen(deployment: FaultDeployment, name: str) -> Mend:
    deployment.freeze(name)

    async def thaw() -> None:
        deployment.thaw(name)

    return thaw


async def kvd_frozen(deployment: FaultDeployment, name: str) -> Mend:
    return await frozen(deployment, f"kvd-{name}")


async def workers_killed(deployment: FaultDeployment, name: str) -> Mend:
    return _signalled_workers(deployment, name, signal.SIGKILL)


async def workers_frozen(deployment: FaultDeployment, name: str) -> Mend:
    return _signalled_workers(deployment, name, signal.SIGSTOP)


def _signalled_workers(deployment: FaultDeployment, name: str, number: signal.Signals) -> Mend:
    """Nothing is repaired from outside: the kvd kills workers that hang, and replaces them."""
    struck = workers_of(name, deployment.processes)
    if not struck:
        raise PeerError(f"{name}: the kvd has no workers at the moment")
    send_signal(struck, number)

    async def replaced() -> bool:
        now = workers_of(name, deployment.processes)
        return len(now) >= len(struck) and not set(now) & set(struck)

    async def wait_until_replaced() -> None:
        try:
            await deployment.until(replaced)
        finally:
            # A kvd that was killed meanwhile leaves its stopped workers behind.
            send_signal(struck, signal.SIGKILL)

    return wait_until_replaced


async def wan_out(deployment: FaultDeployment, name: str) -> Mend:
    deployment.links.order("outage")
    return partial(_order, deployment, "restore")


async def wan_slow(deployment: FaultDeployment, name: str) -> Mend:
    deployment.links.set_rates(SLOW)

    async def back() -> None:
        deployment.links.set_rates(1.0)

    return back


async def wan_damages(deployment: FaultDeployment, name: str) -> Mend:
    deployment.links.order(f"damage {DAMAGED_CHUNKS}")
    return partial(_order, deployment, "damage 0")


async def _order(deployment: FaultDeployment, order: str) -> None:
    deployment.links.order(order)


async def arenas_full(deployment: FaultDeployment, name: str) -> Mend:
    """Grants to no real request reserve all memory of the decode nodes."""
    taken: list[tuple[str, str]] = []

    async def fill(decode: str) -> None:
        stats = await deployment.stats(decode)
        if stats["pool"] is None:
            raise PeerError(f"{decode}: no engine has registered with the kvd yet")
        for pool in (stats["pool"], *stats["more_pools"]):
            await fill_pool(decode, pool)

    async def fill_pool(decode: str, pool: dict[str, Any]) -> None:
        size = pool["block_tokens"]
        tokens = FILLER_TOKENS
        while tokens >= size:
            ids = [len(taken)] * tokens  # a prompt that no client sends
            asked = {
                "hashes": block_hashes(ids, size, salt=f"filler {decode}"),
                "handoff_tokens": tokens,
                "compat": pool["compat"],
            }
            answer = await deployment.post(f"{deployment.kvd_url(decode)}/v1/open", asked)
            if answer["type"] == "grant":
                taken.append((decode, answer["transfer_id"]))
            else:
                tokens //= 2  # what is left may have room for a shorter one

    async def give_back() -> None:
        for decode, transfer in taken:
            try:
                await deployment.post(
                    f"{deployment.kvd_url(decode)}/v1/transfers/{transfer}/abort", {}
                )
            except PeerError:
                continue  # the kvd was restarted, which freed its grants

    try:
        for decode in await deployment.with_role("decode"):
            await fill(decode)
    except (PeerError, asyncio.CancelledError):
        await give_back()  # one of the kvds does not respond, or nobody waits any more
        raise
    return give_back


async def disks_full(deployment: FaultDeployment, name: str) -> Mend:
    """The files of the kvds can no longer grow."""
    limits = {}
    for child, pid in deployment.processes.items():
        if child.startswith("kvd-"):
            try:
                limit = resource.prlimit(pid, resource.RLIMIT_FSIZE)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, limit[1]))
            except ProcessLookupError:
                continue  # another fault has just killed it
            limits[pid] = limit

    async def free() -> None:
        for pid, limit in limits.items():
            try:
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
            except ProcessLookupError:
                continue  # another fault has killed it

    return free


async def clocks_jump(deployment: FaultDeployment, name: str) -> Mend:
    """The wall clocks of all processes jump; the repair is a second jump, back."""
    deployment.wall_clock.set_shift(JUMP_S)

    async def back() -> None:
        deployment.wall_clock.set_shift(0.0)

    return back


async def strike_when_possible(deployment: FaultDeployment, fault: Fault, within_s: float) -> Mend:
    """Waits until a process is in the right state, and strikes it. Raises `TimeoutError` when none
    is within `within_s`. The timeout interrupts only the search: an interrupted strike could leave
    a process killed and never restarted."""
    until_s = deployment.clock.now() + within_s
    if fault.crawls:
        deployment.links.set_rates(CRAWL)
    try:
        while True:
            try:
                async with asyncio.timeout(until_s - deployment.clock.now()):
                    name = await fault.victim(deployment)
                if name is not None:
                    return await fault.strike(deployment, name)
            except PeerError:
                pass  # a process did not respond: try again later
            await asyncio.sleep(LOOK_S)
    finally:
        if fault.crawls:
            deployment.links.set_rates(1.0)


FAULTS = (
    Fault(
        "prefill-killed-computing", "PrfaaS node killed in mid-prefill", "far", prefilling, killed
    ),
    Fault(
        "prefill-killed-sending",
        "PrfaaS node killed in mid-transfer",
        "far",
        sending,
        killed,
        crawls=True,
    ),
    Fault("prefill-kvd-killed", "kvd of the PrfaaS node killed", "far", prefilling, kvd_killed),
    Fault(
        "prefill-worker-killed",
        "worker of the PrfaaS node's kvd killed in mid-transfer",
        "far",
        sending,
        workers_killed,
        crawls=True,
    ),
    Fault("prefill-hangs", "PrfaaS node hangs", "far", prefilling, frozen, lasts_s=15.0),
    Fault(
        "decode-killed-waiting",
        "decode node killed before the first token",
        "decode",
        awaiting,
        killed,
        may=_BREAK,  # other answers may be streaming from that node
    ),
    Fault(
        "decode-killed-streaming",
        "decode node killed after the first token",
        "decode",
        decoding,
        killed,
        may=_BREAK,
        tokens=STREAMED_TOKENS,
    ),
    Fault("decode-kvd-killed", "kvd of a decode node killed", "decode", awaiting, kvd_killed),
    Fault(
        "decode-worker-killed",
        "worker of a decode node's kvd killed in mid-transfer",
        "decode",
        receiving,
        workers_killed,
        crawls=True,
    ),
    Fault(
        "decode-worker-hangs",
        "worker of a decode node's kvd hangs in mid-transfer",
        "decode",
        receiving,
        workers_frozen,
        crawls=True,
    ),
    Fault(
        "decode-hangs",
        "decode node hangs",
        "decode",
        decoding,
        frozen,
        lasts_s=15.0,
        may=_BREAK,
        tokens=STREAMED_TOKENS,
    ),
    Fault(
        "decode-kvd-hangs",
        "kvd of a decode node hangs",
        "decode",
        awaiting,
        kvd_frozen,
        lasts_s=15.0,
    ),
    Fault(
        "gateway-killed",
        "one of two gateways killed",
        "gateway",
        a_gateway,
        killed,
        may=frozenset({Verdict.LOST}),
    ),
    Fault("wan-cut", "WAN cut", "wan", prefilling, wan_out, lasts_s=8.0),
    Fault("wan-slow", "WAN slowed to 1%", "wan", prefilling, wan_slow, lasts_s=8.0),
    Fault("wan-damage", "KV bytes damaged on the WAN", "wan", prefilling, wan_damages, lasts_s=3.0),
    Fault(
        "arena-full", "arenas of all decode nodes full", "store", anytime, arenas_full, lasts_s=4.0
    ),
    Fault("disk-full", "disks of all kvds full", "store", anytime, disks_full, lasts_s=4.0),
    Fault(
        "clock-jump", "wall clocks jump by an hour", "clock", prefilling, clocks_jump, lasts_s=2.0
    ),
)


def fault(name: str) -> Fault:
    return next(fault for fault in FAULTS if fault.name == name)
