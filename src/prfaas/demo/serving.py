"""The demo's first part: a real model on three nodes, short and long prompts, a cut of the WAN."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment
from prfaas.demo.shared import Check, RelayReader, run_watched, with_policy
from prfaas.errors import PeerError
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.commands import relayed_links
from prfaas.launch.deployment import RunningDeployment, launched_gateway, launched_hosts
from prfaas.launch.preparation import (
    CACHE,
    TINY_DEVICE,
    LaunchOptions,
    prepare_launch,
    tiny_deployment,
)
from prfaas.launch.request_outcomes import RequestOutcome, RequestOutcomes
from prfaas.launch.services.hosts import list_hosts
from prfaas.measure.client import Target, TimedResponse, connect
from prfaas.measure.open_loop import RequestTemplate
from prfaas.measure.prompts import PromptGenerator, PromptPart

OUTPUT_TOKENS = 16
CUT_PROMPTS = 2
OUTAGE_S = 2.0
TOLD_S = 60.0  # timeout of the gateway's log line about a request; only a lost line takes longer
LOOK_S = 0.02  # between two polls of the relay's counter


@dataclass(slots=True)
class ServedPrompt:
    """One prompt with the answer of the deployment and the expected answer of a single node."""

    what: str
    ids: list[int]
    answer: TimedResponse
    outcome: RequestOutcome
    wan_bytes: int | None
    expected: list[int] = field(default_factory=list)

    @property
    def same(self) -> bool:
        return self.answer.error is None and self.answer.token_ids == self.expected


class ServedDeployment:
    def __init__(
        self,
        live: RunningDeployment,
        outcomes: RequestOutcomes,
        relay_reader: RelayReader,
        gateway: Target,
        single_node: Target,
    ) -> None:
        assert gateway.model is not None
        self._outcomes = outcomes
        self._relay_reader = relay_reader
        self._gateway = gateway
        self._single_node = single_node
        self._ask = RequestTemplate(gateway.model)
        self._prompts = PromptGenerator()
        (link,) = relayed_links(live.deployment)
        self._relay = live.hosts.children.named(link.name)

    def ids(self, name: str, tokens: int) -> list[int]:
        text = self._prompts.text([PromptPart(name.encode(), tokens)])
        return [int(word) for word in text.split(b",")]

    async def serve(self, what: str, ids: list[int], *, counted: bool = True) -> ServedPrompt:
        """`counted`: no other request uses the WAN meanwhile, so the relay's counter shows the
        bytes of this one."""
        before = await self._relay_reader.carried_bytes(self._relay) if counted else 0
        answer = await self._gateway.complete(_body(self._ask, ids))
        wan_bytes = (
            await self._relay_reader.carried_bytes(self._relay) - before if counted else None
        )
        return ServedPrompt(what, ids, answer, await self._logged_outcome(answer), wan_bytes)

    async def expect(self, served: Sequence[ServedPrompt]) -> None:
        """Computes the same prompts on a single node, with a new salt so that no cache is used."""
        assert self._single_node.model is not None
        for one in served:
            template = RequestTemplate(self._single_node.model, salt=secrets.token_hex(8))
            answer = await self._single_node.complete(_body(template, one.ids))
            if answer.error is not None:
                raise PeerError(f"{self._single_node.url}: {answer.error}")
            one.expected = answer.token_ids

    async def cut(self, prompts: Sequence[list[int]]) -> list[ServedPrompt]:
        """Sends long prompts at once, and takes the WAN down for `OUTAGE_S` as soon as it carries
        their KV."""
        idle = await self._relay_reader.carried_bytes(self._relay)
        asking = [
            asyncio.create_task(self.serve(f"during the cut {n}", ids, counted=False))
            for n, ids in enumerate(prompts, start=1)
        ]
        while await self._relay_reader.carried_bytes(self._relay) == idle:
            if all(task.done() for task in asking):
                break
            await asyncio.sleep(LOOK_S)
        for order in ("outage", "cut"):
            self._relay.write_line(order)
        await asyncio.sleep(OUTAGE_S)
        self._relay.write_line("restore")
        return await asyncio.gather(*asking)

    async def _logged_outcome(self, answer: TimedResponse) -> RequestOutcome:
        async with asyncio.timeout(TOLD_S):
            return await self._outcomes.of(answer.request_id)


async def serve_prompts(folder: Path, screen: Console, say: Callable[[str], None]) -> list[Check]:
    options = LaunchOptions("hf", device=TINY_DEVICE)
    deployment, profile = await tiny_deployment(CACHE, options, say)
    ready = prepare_launch(with_fixed_threshold(deployment), profile, options, folder)
    outcomes, relay_reader = RequestOutcomes(), RelayReader()
    async with (
        launched_hosts(
            ready.deployment,
            ready.engines,
            folder,
            attached_prefix(),
            say=say,
            on_line=relay_reader.read_line,
        ) as here,
        launched_gateway(here, ready.deployment, say=say, on_line=outcomes.read_line) as live,
        connect(live.gateway_url, MonotonicClock()) as gateway,
        connect(_remote_url(live), MonotonicClock()) as single_node,
    ):
        session = ServedDeployment(live, outcomes, relay_reader, gateway, single_node)
        return await run_watched(here.children, _play(session, live, screen, say))


def with_fixed_threshold(deployment: Deployment) -> Deployment:
    """The deployment with the `paper` policy and a fixed threshold, because this part shows the
    planned threshold. The loop that raises the threshold is off: on a busy machine the relay is
    slow, and the loop may take that for a slow link."""
    deployment = with_policy(deployment, "paper")
    rules = deployment.scheduler
    fixed = msgspec.structs.replace(rules.paper, limit=1.0)
    return msgspec.structs.replace(
        deployment, scheduler=msgspec.structs.replace(rules, paper=fixed)
    )


async def _play(
    session: ServedDeployment, live: RunningDeployment, screen: Console, say: Callable[[str], None]
) -> list[Check]:
    state = await live.state()
    threshold = state["plan"]["threshold_tokens"]
    short, long = max(16, threshold // 4), threshold + threshold // 4
    say("sending a short prompt, a long one, and a second turn of each")
    served = [await session.serve("warm-up", session.ids("warm-up", long))]
    for name, tokens in (("short", short), ("long", long)):
        first = await session.serve(name, session.ids(name, tokens))
        more = [*first.ids, *first.answer.token_ids, *session.ids(f"{name} again", short)]
        served += [first, await session.serve(f"{name}, second turn", more)]
    served = served[1:]  # the warm-up opened connections
    say("computing the same answers on a single node")
    await session.expect(served)
    link = live.deployment.links[0]
    model = live.deployment.model.name
    screen.print(
        _table(
            f"{model}: prompts with more than {threshold:,} uncached tokens (planned threshold) "
            f"are long; the WAN has {link.gbps:g} Gbit/s and a round trip of {link.rtt_ms:g} ms",
            served,
        )
    )
    say(f"cutting the WAN for {OUTAGE_S:g} s while it carries the KV of {CUT_PROMPTS} long prompts")
    cut = await session.cut([session.ids(f"cut {n}", long) for n in range(CUT_PROMPTS)])
    await session.expect(cut)
    screen.print(_table("prompts whose KV was in transit when the WAN was cut", cut))
    return _checks(served, cut)


def _checks(served: Sequence[ServedPrompt], cut: Sequence[ServedPrompt]) -> list[Check]:
    def routes(name: str) -> list[str]:
        return [one.outcome.route for one in served if one.what == name]

    equal, lost = sum(one.same for one in served), [one for one in cut if not one.same]
    again = [one.outcome.cached_tokens for one in served if "second" in one.what]
    saved = [one for one in cut if one.outcome.attempts > 1]
    return [
        Check(
            "short prompts are prefilled locally, long prompts remotely",
            routes("short") == ["local"] and routes("long") == ["remote"],
            f"short: {routes('short')[0]}, long: {routes('long')[0]}",
        ),
        Check(
            "a second turn reuses the KV of the first",
            all(again),
            f"{again} tokens were cached",
        ),
        Check(
            "answers equal those of a single node",
            equal == len(served),
            f"{equal} of {len(served)}, token by token",
        ),
        Check(
            "a cut of the WAN loses no request",
            not lost,
            f"{len(cut) - len(lost)} of {len(cut)} answers are correct, {len(saved)} after a retry",
        ),
    ]


def _table(title: str, served: Sequence[ServedPrompt]) -> Table:
    table = Table(title=title, title_justify="left")
    for column in (
        "prompt",
        "tokens",
        "cached",
        "prefilled at",
        "why",
        "WAN (KB)",
        "TTFT (s)",
        "answer",
    ):
        table.add_column(column, justify="right" if column[0] in "tcWT" else "left")
    for one in served:
        outcome = one.outcome
        again = f"; attempt {outcome.attempts}" if outcome.attempts > 1 else ""
        table.add_row(
            one.what,
            f"{len(one.ids):,}",
            f"{outcome.cached_tokens:,}",
            outcome.prefill or outcome.decode,
            f"{outcome.reason.partition(':')[0]}{again}",
            "" if one.wan_bytes is None else f"{one.wan_bytes / 1e3:,.0f}",
            "-" if not one.answer.event_times_s else f"{one.answer.ttft_s:.2f}",
            "equal" if one.same else one.answer.error or "NOT equal",
        )
    return table


def _remote_url(live: RunningDeployment) -> str:
    remote = live.deployment.of_kind("prfaas")[0].name
    first = next(host for host in list_hosts(live.deployment) if host.cluster == remote)
    return live.hosts.engine_urls[first.name]


def _body(ask: RequestTemplate, ids: Sequence[int]) -> bytes:
    return ask.body(",".join(map(str, ids)).encode(), OUTPUT_TOKENS)
