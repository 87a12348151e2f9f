"""Stand-in hosts: the nodes and kvds of a deployment, all in this process, over real sockets.

A host is a node and its kvd at one port. It speaks the part of their HTTP APIs that a gateway uses,
at a pace that the test chooses, and it may be slow, lost and returned. Its engine computes no
model: the state of a prompt is a running digest of its tokens, a transfer carries that digest, and
the answer follows from it. So an answer that was continued from the state of another prompt, or
from a transfer that has not arrived, has other tokens than `expected_tokens` says. `Books` keep
what every host has done, of hosts that were lost as well.

Between the kvds, `Link`s carry bytes at their rate, and report as kvds do. Leases, transfers and
planning records follow the rules of `prfaas.kvd`, whose pure parts are used where there are any.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from aiohttp import web

from prfaas.cache.hashing import block_hashes
from prfaas.contracts import kv_transfer_params
from prfaas.contracts.kv_transfer_params import RemoteDecode, RemotePrefill
from prfaas.contracts.kvd_api import (
    AbortTransfer,
    ArrivalCounters,
    ClaimPlanning,
    EngineReport,
    EventPage,
    KvdErrorBody,
    KvdReport,
    Occupancy,
    OpenTransfer,
    PoolCounters,
    PoolReport,
    PrefixPulled,
    PullPrefix,
    PutRecord,
    RecordPut,
    Role,
    SetRole,
    TransferStatus,
    shapes_of,
)
from prfaas.contracts.openai import Error, ErrorBody
from prfaas.contracts.openai_fields import known_fields
from prfaas.kvd.events import EventLog
from prfaas.kvd.planning_lease import decide, first_promise
from prfaas.kvd.planning_records import PlanningRecords
from prfaas.kvd.role import compare_and_set
from prfaas.kvspec import FullAttention, KVSpec
from prfaas.tracing.context import TRACEPARENT
from prfaas.types import BlockHash, Compat, Grant, HashEvent, LinkStats, NodeId, TransferId

MODEL = "stand-in"
PORT = 9100
BLOCK_TOKENS = 64
LARGEST_TOKEN = 100_000
_TICK_S = 0.005  # of a link that carries something
_ENDED = ("released", "failed")
Kind: TypeAlias = Literal["prefill", "decode"]
M = TypeVar("M", bound=msgspec.Struct)


class State:
    """What an engine has after some tokens of a prompt."""

    def __init__(self, digest: Any = None) -> None:
        self._digest = digest or hashlib.sha256()

    def after(self, tokens: Sequence[int]) -> State:
        digest = self._digest.copy()
        digest.update(np.asarray(tokens, dtype=np.uint32).tobytes())
        return State(digest)

    def answer(self, count: int) -> list[int]:
        """The next tokens."""
        seed = self._digest.digest()
        found = (hashlib.sha256(seed + n.to_bytes(4, "big")).digest()[:4] for n in range(count))
        return [int.from_bytes(four, "big") % LARGEST_TOKEN for four in found]


class Prefixes:
    """The prefixes that a host holds: the state after each of their blocks. Nothing is evicted."""

    def __init__(self, node: str) -> None:
        self._node = NodeId(node)
        self._states: dict[bytes, State] = {}
        self.events = EventLog(uuid.uuid4().hex)

    def match(self, hashes: Sequence[bytes]) -> tuple[int, State]:
        """How many tokens of these blocks it holds, and the state after them."""
        held = list(itertools.takewhile(self._states.__contains__, hashes))
        return len(held) * BLOCK_TOKENS, self._states[held[-1]] if held else State()

    def states(self, hashes: Sequence[bytes]) -> dict[bytes, State]:
        return {name: self._states[name] for name in hashes if name in self._states}

    def add(self, states: Mapping[bytes, State]) -> None:
        new = tuple(name for name in states if name not in self._states)
        self._states.update(states)
        if new:
            seq = self.events.next_seq(self._node)
            stored = HashEvent(seq, self._node, _GROUP, BLOCK_TOKENS, new, "stored")
            self.events.add(self._node, [stored])

    async def page(self, since: int, wait_s: float) -> EventPage:
        if since >= 0:
            await self.events.wait(self._node, since, wait_s)
        held = {_GROUP: [BlockHash(name) for name in self._states]}
        return self.events.page(self._node, since, held)


def compute(
    prompt: Sequence[int], hashes: Sequence[bytes], done: int, state: State
) -> tuple[State, dict[bytes, State]]:
    """The state after the whole prompt, and those after its blocks, from the state after `done` of
    its tokens."""
    blocks: dict[bytes, State] = {}
    for name in hashes[done // BLOCK_TOKENS :]:
        state = blocks[name] = state.after(prompt[done : done + BLOCK_TOKENS])
        done += BLOCK_TOKENS
    return state.after(prompt[done:]), blocks


def expected_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What one engine answers to the whole prompt."""
    return State().after(prompt).answer(count)


# What the hosts have done ------------------------------------------------------------------------


@dataclass(slots=True)
class Work:
    """One prefill or decode at one host."""

    request: str  # its id
    host: str
    kind: Kind
    arrived_s: float
    transfer: str = ""  # that it fills, or continues from; empty: all is computed here
    begun_s: float | None = None
    tokens: int = 0  # that were sent to the gateway
    end: str = ""  # done, cancelled, lost, refused; empty: it runs


@dataclass(slots=True)
class Transfer:
    """One transfer at the kvd that receives it."""

    grant: Grant
    request: OpenTransfer
    host: str
    traceparent: str  # of the call that opened it
    state: str = "granted"
    reason: str = ""
    arrived: State | None = None  # what the pages have; damaged until all of it has arrived
    was_committed: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def move(self, state: str, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self.was_committed |= state == "committed"
        self.changed.set()

    @property
    def status(self) -> TransferStatus:
        nbytes = self.grant.max_bytes
        return TransferStatus(self.grant.transfer_id, self.state, self.reason, nbytes)


class Books:
    """What was done, in the order of its arrival, and what no gateway may ask for."""

    def __init__(self) -> None:
        self.work: list[Work] = []
        self.transfers: dict[str, Transfer] = {}
        self.violations: list[str] = []
        # Of the planning lease of every role and record that a gateway which plans has written.
        self.planning_epochs: list[int] = []

    def of(self, request: str) -> list[Work]:
        return [work for work in self.work if work.request == request]

    def running(self) -> list[Work]:
        return [work for work in self.work if not work.end]


# Links -------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Flow:
    sender: str
    peer: str  # the receiver's data address
    left_bytes: float
    begun_s: float
    moved_bytes: float = 0.0  # since the sender's latest report


class Link:
    """From one cluster to another one, or within one. The flows share its rate."""

    def __init__(self, bps: float) -> None:
        self.stated_bps = bps
        self.limits: list[float] = []  # parts of the stated rate that are left; 0: it is cut
        self._flows: list[_Flow] = []
        self._moved: Counter[tuple[str, str]] = Counter()  # bytes, by sender and peer
        self._reported_s: dict[tuple[str, str], float] = {}

    @property
    def share(self) -> float:
        return min(self.limits, default=1.0)

    async def carry(
        self, sender: str, peer: str, nbytes: int, is_wanted: Callable[[], bool]
    ) -> bool:
        """Returns when the bytes have arrived, or when nobody wants them any more: whether they
        have."""
        flow = _Flow(sender, peer, float(nbytes), time.monotonic())
        self._flows.append(flow)
        self._reported_s.setdefault((sender, peer), flow.begun_s)
        try:
            before_s = flow.begun_s
            while flow.left_bytes > 0:
                await asyncio.sleep(_TICK_S)
                if not is_wanted():
                    return False
                now_s = time.monotonic()
                bps = self.stated_bps * self.share / len(self._flows)
                moved = min(flow.left_bytes, bps / 8 * (now_s - before_s))
                flow.left_bytes -= moved
                self._moved[sender, peer] += int(moved)
                before_s = now_s
            return True
        finally:
            self._flows.remove(flow)

    def report(self, sender: str) -> list[LinkStats]:
        """As the sender's kvd reports it, of the time since its previous report."""
        now_s, found = time.monotonic(), []
        for (name, peer), before_s in list(self._reported_s.items()):
            if name != sender:
                continue
            flows = [flow for flow in self._flows if (flow.sender, flow.peer) == (sender, peer)]
            backlog = int(sum(flow.left_bytes for flow in flows))
            bps = 8 * self._moved.pop((sender, peer), 0) / max(now_s - before_s, 1e-3)
            self._reported_s[sender, peer] = now_s
            waited_s = max((now_s - flow.begun_s for flow in flows), default=0.0)
            found.append(
                LinkStats(
                    peer,
                    now_s,
                    connections=int(self.share > 0),
                    goodput_bps=bps,
                    backlog_bytes=backlog,
                    in_flight_bytes=min(backlog, 1 << 20),
                    waited_s=waited_s,
                    rtt_s=0.001,
                    delivery_bps=bps if backlog and bps else None,
                )
            )
        return found


# Hosts -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pace:
    """How fast a host is. Everything may be changed while it runs."""

    prefill_s: Callable[[int], float]  # by the tokens that it computes
    step_s: float = 0.002  # of one output token
    slowness: float = 1.0


class _Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class Host:
    """A node and its kvd at one address of this machine, which is no other process's."""

    def __init__(self, name: str, cluster: str, pace: Pace, world: World, address: str) -> None:
        self.name, self.cluster, self.pace, self._address = name, cluster, pace, address
        self.data_address = f"{address}:{PORT}"  # to stand-ins only
        self.url = f"http://{self.data_address}"
        self.is_lost = True
        self._world = world
        self._books = world.books
        self._server: web.Server | None = None
        self._listener: asyncio.Server | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._card = {
            "id": MODEL,
            "object": "model",
            "max_model_len": 1 << 20,
            "prfaas": {"kvd_url": self.url, "serves": _SERVES},
        }
        self._forget()

    def _forget(self) -> None:
        """A new process has nothing of the former one."""
        self.prefixes = Prefixes(self.name)
        self._role = Role()
        self._records = PlanningRecords()
        self._promise = first_promise(time.monotonic())
        self._incoming: dict[str, Transfer] = {}
        self._aborted: set[str] = set()
        self._engine = asyncio.Lock()  # one prefill at a time, in the order of arrival
        self._prefilling = self._prefills_waiting = self._decoding = 0
        self._begun_s = time.monotonic()

    async def start(self) -> None:
        """A new process, if there is none."""
        if not self.is_lost:
            return
        self._forget()
        server = web.Server(self._handle, handler_cancellation=True, access_log=None)
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(server, self._address, PORT, backlog=512)
        self._server = server
        self.is_lost = False

    async def lose(self) -> None:
        """As when the machine loses its processes: connections are reset, new ones are refused."""
        if self.is_lost:
            return
        self.is_lost = True
        assert self._server is not None and self._listener is not None
        self._listener.close()
        for work in self._books.running():
            if work.host == self.name:
                work.end = "lost"
        for connection in self._server.connections:
            if connection.transport is not None:
                connection.transport.abort()
        for task in list(self._sending):
            task.cancel()
        await self._server.shutdown(0.0)
        await asyncio.gather(*self._sending, return_exceptions=True)
        self._world.lost_receiver(self)

    # HTTP ----------------------------------------------------------------------------------------

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        handler = _PATHS.get((request.method, request.path.partition("?")[0]))
        try:
            if handler is not None:
                return await handler(self, request)
            if request.path.startswith("/v1/transfers/"):
                return await self._transfer(request)
            return web.Response(status=404)
        except _Refused as error:
            body = ErrorBody(Error(str(error), "InternalServerError", None, error.code))
            return _json(body, error.status)
        except ConnectionError:
            return web.Response()  # the gateway has left: this response is not sent

    async def _models(self, request: web.BaseRequest) -> web.Response:
        return _json({"object": "list", "data": [self._card]})

    async def _ok(self, request: web.BaseRequest) -> web.Response:
        return web.Response(text="ok")

    async def _metrics(self, request: web.BaseRequest) -> web.Response:
        running, waiting = self._prefilling + self._decoding, self._prefills_waiting
        return web.Response(
            text=f'vllm:num_requests_running{{engine="0"}} {running}.0\n'
            f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0\n'
        )

    # The kvd -------------------------------------------------------------------------------------

    def open_leases(self) -> list[str]:
        """Transfers that hold memory."""
        return [name for name, one in self._incoming.items() if one.state not in _ENDED]

    def receives(self, transfer_id: str) -> Transfer | None:
        return None if self.is_lost else self._incoming.get(transfer_id)

    async def _stats(self, request: web.BaseRequest) -> web.Response:
        states = Counter(one.state for one in self._incoming.values())
        leases = len(self.open_leases())
        pool = PoolReport(
            _COMPAT,
            _SHAPES,
            BLOCK_TOKENS,
            1 << 20,
            Occupancy(None, leases, 0, leases, 0),
            {},
            PoolCounters(),
        )
        report = KvdReport(
            node=NodeId(self.name),
            instance=self.prefixes.events.instance,
            data_address=self.data_address,
            role=self._role,
            engines=(EngineReport(f"engine-{self.name}", self.url, 1),),
            pool=pool,
            incoming=dict(states),
            outgoing={"sending": len(self._sending)},
            held_leases=leases,
            arrivals=ArrivalCounters(states["granted"], 0, 0, 0, 0, 0),
            links=tuple(self._world.link_reports(self)),
            next_seq={NodeId(self.name): self.prefixes.events.next_seq(NodeId(self.name))},
            records=tuple(self._records),
        )
        return _json(report)

    async def _events(self, request: web.BaseRequest) -> web.Response:
        since, wait_s = int(request.query["since"]), float(request.query.get("wait_s", 0))
        return _json(await self.prefixes.page(since, wait_s))

    async def _pull(self, request: web.BaseRequest) -> web.Response:
        """Copies a prefix; the source sends while it lives."""
        asked = await _read(request, PullPrefix)
        source = next(h for h in self._world.hosts.values() if h.url == asked.source)
        here, _ = self.prefixes.match(asked.hashes)
        there = 0 if source.is_lost else source.prefixes.match(asked.hashes)[0]
        if there <= here:
            return _json(PrefixPulled(here, 0))
        nbytes = _SPEC.kv_bytes(there, here)
        states = source.prefixes.states(asked.hashes[: there // BLOCK_TOKENS])

        def is_wanted() -> bool:
            return not (self.is_lost or source.is_lost)

        link = self._world.link(source, self)
        try:
            async with asyncio.timeout(asked.within_s):
                arrived = await link.carry(source.name, self.data_address, nbytes, is_wanted)
        except TimeoutError:
            arrived = False
        if not arrived:
            return _json(KvdErrorBody("failed", "the prefix did not arrive"), 502)
        self.prefixes.add(states)
        return _json(PrefixPulled(there, nbytes))

    async def _get_role(self, request: web.BaseRequest) -> web.Response:
        return _json(self._role)

    async def _set_role(self, request: web.BaseRequest) -> web.Response:
        asked = await _read(request, SetRole)
        role = compare_and_set(self._role, asked, self._promise.epoch)
        if role is None:
            return _json(self._role, 409)
        self._role = role
        self._books.planning_epochs.append(asked.planning_epoch)
        return _json(role)

    async def _claim(self, request: web.BaseRequest) -> web.Response:
        claim = await _read(request, ClaimPlanning)
        self._promise, lease = decide(self._promise, claim, time.monotonic())
        return _json(lease)

    async def _record(self, request: web.BaseRequest) -> web.Response:
        found = self._records.record(request.query["name"], time.monotonic())
        return _json(found or KvdErrorBody("unknown", "no such record"), 200 if found else 404)

    async def _put_record(self, request: web.BaseRequest) -> web.Response:
        put = await _read(request, PutRecord)
        accepted = self._records.put(put, self._promise.epoch, time.monotonic())
        if accepted and put.planning_epoch:
            self._books.planning_epochs.append(put.planning_epoch)
        return _json(RecordPut(accepted, self._records.version(put.name)))

    async def _open(self, request: web.BaseRequest) -> web.Response:
        asked = await _read(request, OpenTransfer)
        assert asked.transfer_id is not None
        name = asked.transfer_id
        if name in self._aborted:
            return _json(KvdErrorBody("ended", "aborted before it was opened"), 409)
        known = self._incoming.get(name)
        if known is None:
            held, _ = self.prefixes.match(asked.hashes)
            nbytes = _SPEC.kv_bytes(asked.handoff_tokens, held)
            skip = {_GROUP: held}
            grant = Grant(name, uuid.uuid4().hex, self.data_address, skip, nbytes, 60.0)
            trace = request.headers.get(TRACEPARENT, "")
            known = self._incoming[name] = Transfer(grant, asked, self.name, trace)
            self._books.transfers[name] = known
        return _json(known.grant)

    async def _transfer(self, request: web.BaseRequest) -> web.Response:
        name, _, verb = request.path.removeprefix("/v1/transfers/").partition("/")
        found = self._incoming.get(name)
        if verb == "abort":
            return self._abort(name, found, (await _read(request, AbortTransfer)).reason)
        if found is None:
            return _json(KvdErrorBody("unknown", f"no transfer {name}"), 404)
        wait_s = float(request.query.get("wait_s", 0))
        if found.state == "granted" and wait_s:
            found.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await found.changed.wait()
        return _json(found.status)

    def _abort(self, name: str, found: Transfer | None, reason: str) -> web.Response:
        if found is None:
            self._aborted.add(name)
            return _json(TransferStatus(TransferId(name), "failed", reason, 0))
        if found.state in ("granted", "committed"):
            found.move("failed", reason)
        return _json(found.status)

    # The engine ----------------------------------------------------------------------------------

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        body: dict[str, Any] = msgspec.json.decode(await request.read())
        asked = body.get("kv_transfer_params") or {}
        half = kv_transfer_params.decode(asked, len(body["prompt"]))
        kind: Kind = "prefill" if isinstance(half, RemoteDecode) else "decode"
        name = request.headers.get("X-Request-Id", "")
        work = Work(name, self.name, kind, time.monotonic())
        self._books.work.append(work)
        try:
            if isinstance(half, RemoteDecode):
                answer: web.StreamResponse = await self._prefill(body, half, work)
            else:
                answer = await self._decode(request, body, half, asked, work)
            work.end = work.end or "done"
            return answer
        except _Refused:
            work.end = work.end or "refused"
            raise
        finally:
            work.end = work.end or "cancelled"

    async def _compute(
        self, prompt: Sequence[int], body: dict[str, Any], work: Work, most: int | None = None
    ) -> tuple[State, dict[bytes, State], int]:
        """The state after the prompt, those after its blocks, and how many of its tokens were
        cached. One prompt after the other, in the order of arrival."""
        hashes = block_hashes(prompt, BLOCK_TOKENS, salt=body.get("cache_salt", ""))
        cached, state = self.prefixes.match(hashes)
        if most is not None and len(prompt) - cached > most:
            raise _Refused(424, "transfer_lost", "less of the prompt is cached here")
        self._prefills_waiting += 1
        try:
            await self._engine.acquire()
        finally:
            self._prefills_waiting -= 1
        self._prefilling += 1
        try:
            work.begun_s = time.monotonic()
            await asyncio.sleep(self.pace.prefill_s(len(prompt) - cached) * self.pace.slowness)
        finally:
            self._prefilling -= 1
            self._engine.release()
        after, blocks = compute(prompt, hashes, cached, state)
        blocks = {**self.prefixes.states(hashes), **blocks}
        self.prefixes.add(blocks)
        return after, blocks, cached

    async def _prefill(
        self, body: dict[str, Any], half: RemoteDecode, work: Work
    ) -> web.StreamResponse:
        work.transfer = half.grant.transfer_id
        prompt = body["prompt"][: half.handoff_tokens]
        state, blocks, cached = await self._compute(prompt, body, work)
        target = self._world.at_data_address(half.grant.data_address)
        task = asyncio.create_task(self._send(half.grant, target, state, blocks))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        usage = _usage(len(prompt), 1, cached)
        return _json({"id": work.request, "object": "text_completion", "choices": [], **usage})

    async def _send(
        self, grant: Grant, target: Host, state: State, blocks: Mapping[bytes, State]
    ) -> None:
        received = target.receives(grant.transfer_id)
        if received is None or received.state != "granted" or received.grant.token != grant.token:
            return
        received.arrived = state.after(
            [0]
        )  # some of it: whoever continues from it has other tokens

        def is_wanted() -> bool:
            return target.receives(grant.transfer_id) is received and received.state == "granted"

        received.arrived = state.after([0])  # a part: an answer from it has other tokens
        link, peer = self._world.link(self, target), target.data_address
        if await link.carry(self.name, peer, grant.max_bytes, is_wanted) and is_wanted():
            received.arrived = state
            target.prefixes.add(blocks)
            received.move("committed")

    async def _decode(
        self,
        request: web.BaseRequest,
        body: dict[str, Any],
        half: object,
        asked: dict[str, Any],
        work: Work,
    ) -> web.StreamResponse:
        prompt: list[int] = body["prompt"]
        if isinstance(half, RemotePrefill):
            work.transfer = half.transfer_id
            attached = self._attach(half.transfer_id, work)
            assert attached.arrived is not None
            done = attached.request.handoff_tokens
            state = attached.arrived.after(prompt[done:])
            work.begun_s = time.monotonic()
        else:
            attached = None
            most = asked.get("max_computed_tokens") if asked.get("do_remainder") else None
            state, _, _ = await self._compute(prompt, body, work, most)
        self._decoding += 1
        try:
            return await self._generate(request, body, state, work)
        finally:
            self._decoding -= 1
            if attached is not None:
                attached.move("released")

    def _attach(self, name: str, work: Work) -> Transfer:
        found = self._incoming.get(name)
        ever = self._books.transfers.get(name)
        if ever is None or not ever.was_committed:
            self._books.violations.append(
                f"{self.name} was asked to decode {work.request} from the transfer {name}, which "
                f"was {'never granted' if ever is None else f'{ever.state}, and never committed'}"
            )
        if found is None or found.state != "committed":
            why = "is not known here" if found is None else f"is {found.state}"
            raise _Refused(424, "transfer_lost", f"transfer {name} {why}")
        found.move("attached")
        return found

    async def _generate(
        self, request: web.BaseRequest, body: dict[str, Any], state: State, work: Work
    ) -> web.StreamResponse:
        tokens = state.answer(int(body["max_tokens"]))
        usage = _usage(len(body["prompt"]), len(tokens))
        head = {"id": work.request, "object": "text_completion", "created": 0, "model": MODEL}
        if not body.get("stream"):
            await asyncio.sleep(len(tokens) * self.pace.step_s * self.pace.slowness)
            work.tokens = len(tokens)
            return _json({**head, "choices": [_choice(tokens, "length")], **usage})
        response = web.StreamResponse()
        response.content_type = "text/event-stream"
        await response.prepare(request)
        for number, token in enumerate(tokens, 1):
            await asyncio.sleep(self.pace.step_s * self.pace.slowness)
            reason = "length" if number == len(tokens) else None
            await _send_event(response, {**head, "choices": [_choice([token], reason)]})
            work.tokens = number
        if (body.get("stream_options") or {}).get("include_usage"):
            await _send_event(response, {**head, "choices": [], **usage})
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


_Handler: TypeAlias = Callable[[Host, web.BaseRequest], Awaitable[web.StreamResponse]]
_PATHS: dict[tuple[str, str], _Handler] = {
    ("GET", "/v1/models"): Host._models,
    ("GET", "/health"): Host._ok,
    ("GET", "/metrics"): Host._metrics,
    ("POST", "/v1/completions"): Host._complete,
    ("POST", "/v1/completions/render"): Host._ok,
    ("GET", "/v1/stats"): Host._stats,
    ("GET", "/v1/events"): Host._events,
    ("GET", "/v1/role"): Host._get_role,
    ("POST", "/v1/role"): Host._set_role,
    ("POST", "/v1/planning"): Host._claim,
    ("GET", "/v1/records"): Host._record,
    ("POST", "/v1/records"): Host._put_record,
    ("POST", "/v1/open"): Host._open,
    ("POST", "/v1/pull"): Host._pull,
}
_LAYER_BYTES = 50  # of a token
_GROUP = "full"
_SERVES = {"completions": sorted(known_fields("completions")), "chat": sorted(known_fields("chat"))}
_SPEC = KVSpec((FullAttention(_GROUP, (0, 1), _LAYER_BYTES),))
_SHAPES = shapes_of(_SPEC)
_COMPAT = Compat(MODEL, "stand-in", "bfloat16", "float32", BLOCK_TOKENS, "canonical")


def model_entry() -> dict[str, Any]:
    """The model in a catalog file."""
    keys = {"kv_heads": 1, "k_dim": _LAYER_BYTES - 1, "v_dim": 1}
    return {
        **{"name": MODEL, "layers": 2, "status": "inferred", "source": "stand-ins"},
        **{"kv_dtype": "float8_e4m3fn", "state_dtype": "float8_e4m3fn"},
        "groups": [{"kind": "gqa", "layers": [0, 1], **keys}],
    }


class World:
    """All hosts and links of a deployment."""

    def __init__(self, bps: Callable[[str, str], float]) -> None:
        """`bps`: the rate between two clusters, or within one."""
        self.books = Books()
        self.hosts: dict[str, Host] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._bps = bps

    def add(self, name: str, cluster: str, pace: Pace, address: str) -> Host:
        host = self.hosts[name] = Host(name, cluster, pace, self, address)
        return host

    def between(self, source: str, target: str) -> Link:
        """The link between two clusters."""
        found = self._links.get((source, target))
        if found is None:
            found = self._links[source, target] = Link(self._bps(source, target))
        return found

    def link(self, source: Host, target: Host) -> Link:
        return self.between(source.cluster, target.cluster)

    def link_reports(self, sender: Host) -> list[LinkStats]:
        return [
            stats
            for (source, _), link in self._links.items()
            if source == sender.cluster
            for stats in link.report(sender.name)
        ]

    def at_data_address(self, address: str) -> Host:
        return next(host for host in self.hosts.values() if host.data_address == address)

    def lost_receiver(self, host: Host) -> None:
        """Nobody learns any more how its transfers would have ended."""
        for transfer in self.books.transfers.values():
            if transfer.host == host.name and transfer.state not in _ENDED:
                transfer.move("failed", "its kvd was lost")

    def left_behind(self, expires: Callable[[Transfer], bool]) -> list[str]:
        """Memory that is still reserved, and work that still runs, at hosts that live. `expires`:
        nobody is left to release a transfer, other than time."""
        leases = [
            f"{host.name} holds {self.books.transfers[name].state} transfer {name}"
            for host in self.hosts.values()
            if not host.is_lost
            for name in host.open_leases()
            if not expires(self.books.transfers[name])
        ]
        work = [f"{one.host}: {one.kind} of {one.request} runs" for one in self.books.running()]
        return leases + work

    @asynccontextmanager
    async def running(self, names: Collection[str]) -> AsyncIterator[World]:
        """These hosts are started; all are lost at the end."""
        try:
            for name in names:
                await self.hosts[name].start()
            yield self
        finally:
            for host in self.hosts.values():
                await host.lose()


async def _read(request: web.BaseRequest, kind: type[M]) -> M:
    return msgspec.json.decode(await request.read(), type=kind)


def _json(data: object, status: int = 200) -> web.Response:
    body = msgspec.json.encode(data)
    return web.Response(body=body, status=status, content_type="application/json")


async def _send_event(response: web.StreamResponse, data: dict[str, Any]) -> None:
    await response.write(b"data: " + msgspec.json.encode(data) + b"\n\n")


def _choice(tokens: Sequence[int], reason: str | None) -> dict[str, Any]:
    text = "".join(f"{token} " for token in tokens)
    return {"index": 0, "text": text, "token_ids": tokens, "finish_reason": reason}


def _usage(prompt_tokens: int, tokens: int, cached: int = 0) -> dict[str, Any]:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": tokens}
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"usage": {**usage, "total_tokens": prompt_tokens + tokens, **details}}
