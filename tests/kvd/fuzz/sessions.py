"""Valid messages of engines, gateways and other kvds, for any model. No sockets.

A session remembers what a kvd has answered: leases, grants and transfers, also those that have
ended, so that later messages refer to current, stale and foreign identifiers.
"""

from __future__ import annotations

import random
import uuid
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from prfaas.cache.hashing import block_hashes
from prfaas.contracts.kvd_api import (
    AbortTransfer,
    ClaimPlanning,
    MatchPrefix,
    OpenTransfer,
    PullPrefix,
    PushPrefix,
    PutRecord,
    Role,
    shapes_of,
)
from prfaas.kvd.engine_socket.messages import (
    Abort,
    Attach,
    Begin,
    Call,
    Commit,
    Flush,
    Join,
    LeaseTicket,
    Pin,
    Publish,
    Ready,
    Register,
    Release,
    SegmentName,
)
from prfaas.kvspec import KVSpec, LinearState
from prfaas.types import Compat, Grant

PROMPTS = 16
LONGEST = 40  # tokens
REMEMBERED = 64  # leases and grants that later messages may name
C = TypeVar("C", bound=msgspec.Struct)


@lru_cache(maxsize=1_000)
def _hashes(prompt: tuple[int, ...], block_tokens: int) -> tuple[bytes, ...]:
    return tuple(block_hashes(list(prompt), block_tokens))


@dataclass(frozen=True)
class Model:
    """The engine of a kvd."""

    spec: KVSpec
    block_tokens: int
    whole_blocks: bool = False

    @property
    def compat(self) -> Compat:
        return Compat("tiny", "1", "bytes", "bytes", self.block_tokens, "canonical")

    @property
    def native(self) -> Compat:
        """Of engines that register their other form. Its bytes are the same, its pool is not."""
        return msgspec.structs.replace(self.compat, layout="native")

    def register(self, engine_id: str, compat: Compat | None = None) -> Register:
        return Register(
            engine_id,
            shapes_of(self.spec),
            self.block_tokens,
            compat or self.compat,
            self.whole_blocks,
            "http://engine:8000",
        )

    def hashes(self, prompt: Sequence[int]) -> tuple[bytes, ...]:
        return _hashes(tuple(prompt), self.block_tokens)

    def segments(self, ticket: LeaseTicket) -> list[SegmentName]:
        """Everything that the lease requires, in one segment for each layer and state."""
        size = self.block_tokens
        stop = -(-ticket.tokens // size) * size if self.whole_blocks else ticket.tokens
        names: list[SegmentName] = []
        for group in self.spec.groups:
            linear = isinstance(group, LinearState)
            stops = {*ticket.checkpoint_tokens, ticket.tokens} if linear else {stop}
            for layer in group.layers:
                names += (SegmentName(group.name, layer, 0, end) for end in sorted(stops))
        return names


def with_heads(spec: KVSpec, heads: int) -> KVSpec:
    """The same bytes, which ranks can write in this many shares."""
    return KVSpec(tuple(replace(group, heads=heads) for group in spec.groups))


class Granted(NamedTuple):
    grant: Grant
    prompt: Sequence[int]  # the one that the grant was requested for


@dataclass
class Memory:
    """What clients of one kvd know together."""

    data_address: str
    peer_url: str
    node: str
    leases: deque[LeaseTicket] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    granted: deque[Granted] = field(default_factory=lambda: deque(maxlen=REMEMBERED))


class Request(NamedTuple):
    """An HTTP request. `body` is None for GET."""

    method: str
    path: str
    query: dict[str, str]
    body: Any = None
    prompt: Sequence[int] = ()  # of an `OpenTransfer`


class Sessions:
    """Valid next messages, chosen at random."""

    def __init__(self, model: Model, memory: Memory, rng: random.Random) -> None:
        self.model = model
        self.memory = memory
        self._rng = rng
        shared = [rng.randrange(1_000) for _ in range(LONGEST)]
        self.prompts: list[list[int]] = []
        for _ in range(PROMPTS):  # with common prefixes of several lengths
            common = rng.randrange(LONGEST)
            rest = [rng.randrange(1_000) for _ in range(rng.randint(1, LONGEST - common))]
            self.prompts.append(shared[:common] + rest)

    # Engines --------------------------------------------------------------------------------------

    def call(self, leases: dict[int, LeaseTicket]) -> Call:
        """The next call of an engine process that owns these leases. The process no longer owns
        a lease that the call ends."""
        rng, memory = self._rng, self.memory
        chance = rng.random()
        if leases and chance < 0.55:
            ticket = rng.choice(list(leases.values()))
            if chance < 0.3 and ticket.writable:
                names = self.by_heads(self.model.segments(ticket))
                return about(Ready, ticket, segments=tuple(self._some(names)))
            leases.pop(ticket.lease_id, None)
            if not ticket.writable:
                return about(Release, ticket)
            return (
                about(Commit, ticket)
                if chance < 0.48
                else about(Abort, ticket, reason="the request was cancelled")
            )
        match rng.randrange(10):
            case 0 | 1 | 2 | 3:
                return self._begin()
            case 4 if memory.granted:
                return Attach(rng.choice(memory.granted).grant.transfer_id, rng.choice((1, 1, 3)))
            case 5 | 4:
                return Pin(self.model.hashes(rng.choice(self.prompts)))
            case 6 if memory.leases:
                return about(Join, rng.choice(memory.leases))
            case 7:
                wire = rng.choice((0, 0, self.model.block_tokens))
                return Publish(self._payload(), self._group_names(), wire)
            case 8 if memory.leases:
                ticket = rng.choice(memory.leases)
                return about(Commit, ticket) if chance < 0.8 else about(Release, ticket)
            case 9:
                return self.register(f"engine-{rng.randrange(4)}")
        return Flush()

    def _begin(self) -> Begin:
        rng, size = self._rng, self.model.block_tokens
        prompt = rng.choice(self.prompts)
        grant = None
        if self.memory.granted and rng.random() < 0.5:
            grant, granted = rng.choice(self.memory.granted)
            prompt = list(granted) if rng.random() < 0.9 else prompt
        boundaries = list(range(size, len(prompt) + 1, size))
        checkpoints = tuple(self._some(boundaries)) if boundaries and rng.random() < 0.2 else None
        tail = bytes(32) if rng.random() < 0.5 else b""
        return Begin(self.model.hashes(prompt), len(prompt), checkpoints, grant, tail)

    def by_heads(self, names: list[SegmentName]) -> list[SegmentName]:
        """Whole segments, or the shares of two ranks that hold different heads."""
        rng = self._rng
        if rng.random() < 0.5:
            return names
        shares: list[SegmentName] = []
        for name in names:
            heads = self.model.spec[name.group].heads
            cut = rng.randint(0, heads)
            for first, stop in ((0, cut), (cut, heads)):
                if first < stop:
                    share = msgspec.structs.replace(name, first_head=first, heads=stop - first)
                    shares.append(share)
        rng.shuffle(shares)
        return shares

    def _some(self, values: Sequence[Any]) -> list[Any]:
        """All of them, or a part."""
        if self._rng.random() < 0.7:
            return list(values)
        return self._rng.sample(list(values), self._rng.randint(0, len(values)))

    def _group_names(self) -> dict[int, str]:
        return {i: group.name for i, group in enumerate(self.model.spec.groups)}

    def _payload(self) -> bytes:
        """KV events in vLLM's format."""
        rng = self._rng
        return msgspec.msgpack.encode(
            [0.0, [self.engine_event() for _ in range(rng.randint(1, 3))], 0]
        )

    def engine_event(self) -> dict[str, Any]:
        rng = self._rng
        size = rng.choice((1, 1, 2, 3)) * self.model.block_tokens // rng.choice((1, 1, 2, 5)) or 1
        first, blocks = rng.randrange(30), rng.randint(1, 3)
        hashes = list(range(first, first + blocks))
        match rng.randrange(8):
            case 0:
                return {"type": "AllBlocksCleared"}
            case 1 | 2:
                return {"type": "BlockRemoved", "block_hashes": hashes, "group_idx": 0}
        return {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": rng.choice((None, first - 1)),
            "token_ids": [rng.randrange(1_000) for _ in range(blocks * size)],
            "block_size": size,
            "medium": "GPU",
            "extra_keys": rng.choice((None, [["salt"], None], [["adapter", "salt", b"image"]])),
            "lora_name": rng.choice((None, "adapter")),
            "group_idx": rng.randrange(len(self.model.spec.groups)),
        }

    def register(self, engine_id: str) -> Register:
        return self.model.register(engine_id, self._form())

    # Gateways and other kvds ----------------------------------------------------------------------

    def request(self) -> Request:
        rng, memory = self._rng, self.memory
        prompt = rng.choice(self.prompts)
        hashes = self.model.hashes(prompt)
        known = rng.choice(memory.granted).grant.transfer_id if memory.granted else "unknown"
        match rng.randrange(16):
            case 0 | 1 | 2 | 3 | 4:
                return self.open(prompt)
            case 5 | 6:
                return Request("GET", f"/v1/transfers/{known}", {"wait_s": "0.01"})
            case 7:
                return Request("POST", f"/v1/transfers/{known}/abort", {}, AbortTransfer("unused"))
            case 8:
                compat = rng.choice((None, self.model.compat, self.model.native))
                return Request("POST", "/v1/match", {}, MatchPrefix(hashes, compat))
            case 9 if rng.random() < 0.3:
                within_s = rng.choice((0.05, 5.0))
                compat = rng.choice((None, self._form()))
                pull = PullPrefix(memory.peer_url, hashes, memory.data_address, within_s, compat)
                return Request("POST", "/v1/pull", {}, pull)
            case 10 | 11 if memory.granted:
                grant, granted = rng.choice(memory.granted)
                hashes = self.model.hashes(granted) if rng.random() < 0.9 else hashes
                push = PushPrefix(hashes, self._form(grant), grant)
                return Request("POST", "/v1/push", {}, push)
            case 12:
                query = {"check": "1"} if rng.random() < 0.1 else {}
                return Request("GET", rng.choice(("/v1/stats", "/metrics", "/health")), query)
            case 13 | 14:
                pools = (memory.node, f"{memory.node}/native", f"{memory.node}/canonical")
                node = rng.choice((*pools, "engine-0", "engine-1", "unknown"))
                since = str(rng.choice((-1, 0, 0, 5, rng.randrange(1_000))))
                return Request("GET", "/v1/events", {"node": node, "since": since, "wait_s": "0"})
            case 15:
                return Request("POST", "/v1/role", {}, Role("prefill", rng.randrange(3)))
        if rng.random() < 0.5:
            claim = ClaimPlanning(rng.choice("ab"), rng.randrange(4), rng.choice((0.0, 1.0, 60.0)))
            return Request("POST", "/v1/planning", {}, claim)
        if rng.random() < 0.5:
            name, number = rng.choice(("plan", "drain/west")), rng.randrange(4)
            data = rng.randbytes(rng.choice((0, 10, 1_000)))
            epoch, planning = rng.randrange(3), rng.randrange(3)
            put = PutRecord(name, epoch, number, data, planning_epoch=planning)
            return Request("POST", "/v1/records", {}, put)
        if rng.random() < 0.5:
            return Request("GET", "/v1/records", {"name": "plan"})
        return Request("GET", "/v1/role", {})

    def open(self, prompt: Sequence[int], compat: Compat | None = None) -> Request:
        """In one of the two forms, when the caller names none."""
        rng, size = self._rng, self.model.block_tokens
        last = len(prompt) // size * size
        more: dict[str, Any] = {}
        if last and rng.random() < 0.3:
            more["checkpoint_tokens"] = last
        if "transfer_id" in OpenTransfer.__struct_fields__ and rng.random() < 0.5:
            more["transfer_id"] = str(uuid.UUID(int=rng.getrandbits(128)))
            if self.memory.granted and rng.random() < 0.2:
                more["transfer_id"] = rng.choice(self.memory.granted).grant.transfer_id
        hashes = self.model.hashes(prompt)
        asked = OpenTransfer(hashes, len(prompt), compat or self._form(), **more)
        return Request("POST", "/v1/open", {}, asked, prompt)

    def _form(self, grant: Grant | None = None) -> Compat:
        """The format of one of the two pools, mostly of the one that made the grant."""
        native = self._rng.random() < 0.2
        if grant is not None:
            native = (grant.form == "native") != native
        return self.model.native if native else self.model.compat


def about(kind: type[C], ticket: LeaseTicket, **more: Any) -> C:
    """A message about a lease: the fields that are not given are those of the ticket."""
    for name in kind.__struct_fields__:
        if name not in more and hasattr(ticket, name):
            more[name] = getattr(ticket, name)
    return kind(**more)


def http_bytes(request: Request, body: bytes | None) -> bytes:
    """The request as it is sent. `body` may differ from the request's."""
    query = "&".join(f"{quote(name)}={quote(value)}" for name, value in request.query.items())
    target = f"{request.path}?{query}" if query else request.path
    head = f"{request.method} {target} HTTP/1.1\r\nHost: localhost\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n".encode("utf-8", "surrogateescape") + (body or b"")
