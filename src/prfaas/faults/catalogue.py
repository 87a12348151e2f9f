"""The faults: when each strikes, whom, what is done, and how it is mended.

A victim is looked for until somebody is in the right moment; striking returns what mends it. The
campaign goes through all of them, the soak draws from them.
"""

from __future__ import annotations

import asyncio
import re
import resource
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

from prfaas.cache.hashing import block_hashes
from prfaas.errors import PeerError
from prfaas.faults.deployment import GATEWAYS, LOOK_S, FaultDeployment
from prfaas.faults.questions import Verdict

Mend: TypeAlias = Callable[[], Awaitable[None]]
Victim: TypeAlias = Callable[[FaultDeployment], Awaitable[str | None]]
Part: TypeAlias = Literal["far", "decode", "gateway", "wan", "store", "clock"]
Strike: TypeAlias = Callable[[FaultDeployment, str], Awaitable[Mend]]

SLOW = 0.01  # of the WAN's rate
CRAWL = 0.005  # so that a transfer lasts until somebody is killed in its middle
DAMAGED_CHUNKS = 20
JUMP_S = 3600.0
TOKENS = 8
_BREAK = frozenset({Verdict.BROKEN})
STREAMED_TOKENS = 60  # so many take seconds
FILLER_TOKENS = 65_536  # of one grant that fills an arena
_RUNNING = re.compile(r"^vllm:num_requests_running{[^}]*} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    what: str  # for people
    part: Part  # of the deployment: a soak spares one that is being mended
    victim: Victim  # None: not now
    strike: Strike
    lasts_s: float = 0.0  # before it is mended; a service manager starts the dead again at once
    crawls: bool = False  # the WAN does, until it has struck: the moment then lasts
    may: frozenset[Verdict] = frozenset()  # become of answers under way, beside the right one
    tokens: int = TOKENS  # of each answer while it strikes


# Moments ------------------------------------------------------------------------------------------


async def anytime(stage: FaultDeployment) -> str | None:
    return stage.far


async def prefilling(stage: FaultDeployment) -> str | None:
    """The far node computes."""
    outgoing = (await stage.stats(stage.far))["outgoing"]
    return stage.far if outgoing["writing"] else None


async def sending(stage: FaultDeployment) -> str | None:
    """It has computed; the link still has to carry some of it."""
    outgoing = (await stage.stats(stage.far))["outgoing"]
    return stage.far if outgoing["sending"] else None


async def awaiting(stage: FaultDeployment) -> str | None:
    """A decode node to which state is on its way: no token of that request has been sent."""
    for name in await stage.with_role("decode"):
        if (await stage.stats(name))["incoming"]["granted"]:
            return name
    return None


async def decoding(stage: FaultDeployment) -> str | None:
    """A decode node that answers, and has let go of the state it began with."""
    for name in await stage.with_role("decode"):
        incoming = (await stage.stats(name))["incoming"]
        if await running(stage, name) and not incoming["attached"]:
            return name
    return None


async def running(stage: FaultDeployment, name: str) -> bool:
    found = _RUNNING.search(await stage.text(f"{stage.node(name).url}/metrics"))
    return found is not None and float(found[1]) > 0


async def a_gateway(stage: FaultDeployment) -> str | None:
    """One that has something to do."""
    for number, name in enumerate(GATEWAYS):
        if (await stage.state(number))["requests"]["in_flight"]:
            return name
    return None


# Strikes ------------------------------------------------------------------------------------------


async def killed(stage: FaultDeployment, name: str) -> Mend:
    await stage.kill(name)
    return partial(stage.restart, name)


async def kvd_killed(stage: FaultDeployment, name: str) -> Mend:
    return await killed(stage, f"kvd-{name}")


async def frozen(stage: FaultDeployment, name: str) -> Mend:
    child = stage.child(name)
    child.freeze()

    async def thaw() -> None:
        child.thaw()

    return thaw


async def kvd_frozen(stage: FaultDeployment, name: str) -> Mend:
    return await frozen(stage, f"kvd-{name}")


async def wan_out(stage: FaultDeployment, name: str) -> Mend:
    stage.wan("outage")
    return partial(_order, stage, "restore")


async def wan_slow(stage: FaultDeployment, name: str) -> Mend:
    stage.wan(f"gbps {stage.gbps * SLOW:g}")
    return partial(_order, stage, f"gbps {stage.gbps:g}")


async def wan_damages(stage: FaultDeployment, name: str) -> Mend:
    stage.wan(f"damage {DAMAGED_CHUNKS}")
    return partial(_order, stage, "damage 0")


async def _order(stage: FaultDeployment, order: str) -> None:
    stage.wan(order)


async def arenas_full(stage: FaultDeployment, name: str) -> Mend:
    """Somebody else has reserved all that the decode nodes have."""
    taken: list[tuple[str, str]] = []

    async def fill(decode: str) -> None:
        pool = (await stage.stats(decode))["pool"]
        if pool is None:
            raise PeerError(f"{decode}: no engine has registered with its kvd yet")
        size = pool["block_tokens"]
        while True:
            ids = [len(taken)] * FILLER_TOKENS  # a prompt that nobody has
            asked = {
                "hashes": block_hashes(ids, size, salt=f"filler {decode}"),
                "handoff_tokens": FILLER_TOKENS,
                "compat": pool["compat"],
            }
            answer = await stage.post(f"{stage.kvd_url(decode)}/v1/open", asked)
            if answer["type"] != "grant":
                return
            taken.append((decode, answer["transfer_id"]))

    async def give_back() -> None:
        for decode, transfer in taken:
            try:
                await stage.post(f"{stage.kvd_url(decode)}/v1/transfers/{transfer}/abort", {})
            except PeerError:
                continue  # it was restarted, and has forgotten them

    try:
        for decode in await stage.with_role("decode"):
            await fill(decode)
    except PeerError:
        await give_back()  # one of them is not there
        raise
    return give_back


async def disks_full(stage: FaultDeployment, name: str) -> Mend:
    """No kvd's file may grow any more."""
    limits = {}
    for child, pid in stage.processes.items():
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
                continue  # killed by another fault

    return free


async def clocks_jump(stage: FaultDeployment, name: str) -> Mend:
    """Everybody's wall clock; the way back is a jump, too."""
    stage.wall_clock.set_off(JUMP_S)

    async def back() -> None:
        stage.wall_clock.set_off(0.0)

    return back


async def struck(stage: FaultDeployment, fault: Fault, within_s: float) -> Mend:
    """Strikes in the right moment. Raises `TimeoutError` when none comes. Looking for it is broken
    off then, a strike never: it might have killed somebody whom nobody would start again."""
    until_s = stage.clock.now() + within_s
    if fault.crawls:
        stage.wan(f"gbps {stage.gbps * CRAWL:g}")
    try:
        while True:
            try:
                async with asyncio.timeout(until_s - stage.clock.now()):
                    name = await fault.victim(stage)
                if name is not None:
                    return await fault.strike(stage, name)
            except PeerError:
                pass  # whoever was asked is not there: not now
            await asyncio.sleep(LOOK_S)
    finally:
        if fault.crawls:
            stage.wan(f"gbps {stage.gbps:g}")


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
    Fault("prefill-hangs", "PrfaaS node hangs", "far", prefilling, frozen, lasts_s=15.0),
    Fault(
        "decode-killed-waiting",
        "decode node killed before the first token",
        "decode",
        awaiting,
        killed,
        may=_BREAK,  # others may stream there
    ),
    Fault(
        "decode-killed-streaming",
        "decode node killed behind the first token",
        "decode",
        decoding,
        killed,
        may=_BREAK,
        tokens=STREAMED_TOKENS,
    ),
    Fault("decode-kvd-killed", "kvd of a decode node killed", "decode", awaiting, kvd_killed),
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
