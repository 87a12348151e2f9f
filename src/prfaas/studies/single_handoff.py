"""One hand-off between two nodes, without a gateway: grant, prefill, commit and decode in turn.

This is the check of a new pair of nodes: it shows the time and the bytes of every step, and whether
the decode node answers as the prefill node does. The gateway overlaps, retries and schedules
hand-offs; this module does none of that (`prfaas.gateway.dispatch`).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from prfaas.cache.hashing import block_hashes
from prfaas.clock import Clock
from prfaas.config.gateway import DEFAULTS
from prfaas.contracts.kv_transfer_params import RemoteDecode, RemotePrefill, ResponseParams, encode
from prfaas.contracts.kvd_api import OpenTransfer
from prfaas.errors import InputError, PeerError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.http_client.client import HttpClient, open_client
from prfaas.scheduler.handoff import choose_handoff
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import TlsIdentity
from prfaas.types import Compat, Grant, NotNow

_TIMEOUTS = DEFAULTS.timeouts


@dataclass(frozen=True, slots=True)
class NodePair:
    """URLs of a prefill node and a decode node. A `prfaas node` reports the URL of its kvd; for
    other servers the URLs of the kvds are given here."""

    prefill_url: str
    decode_url: str
    prefill_kvd_url: str | None
    decode_kvd_url: str | None
    member_key: SharedKey | None = None  # sent to both nodes and their kvds
    tls: TlsIdentity | None = None


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    prompt: str | list[int]  # the decode node tokenises text
    max_tokens: int
    salt: str = ""
    compare: bool = False  # whether the prefill node also computes the whole answer
    handoff_tokens: int | None = None  # None: as a gateway chooses it
    decode_fields: Mapping[str, Any] = field(default_factory=dict)  # more of the decode request


@dataclass(slots=True)
class HandoffStep:
    name: str
    began_s: float  # since the first step
    took_s: float = 0.0
    nbytes: int | None = None
    note: str = ""


@dataclass(slots=True)
class HandoffReport:
    prompt_tokens: int
    handoff_tokens: int
    steps: list[HandoffStep] = field(default_factory=list)
    answer: list[int] | None = None
    text: str = ""
    expected: list[int] | None = None  # the prefill node's answer; None without `compare`
    # Of the answer's tokens; None unless `decode_fields` asks for them.
    logprobs: list[float] | None = None
    skip_tokens: dict[str, int] = field(default_factory=dict)  # per group, of the grant
    # Prompt tokens that an engine read instead of computing; None: it does not report them.
    prefill_cached: int | None = None
    decode_cached: int | None = None

    @property
    def sent_bytes(self) -> int | None:
        """None without a hand-off, or when the prefill node's kvd is not known."""
        return next((step.nbytes for step in self.steps if step.name == "commit"), None)

    def as_dict(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


async def run_handoff(pair: NodePair, request: HandoffRequest, clock: Clock) -> HandoffReport:
    """Raises `PeerError` when a process does not respond or fails, and `InputError` when the pair
    cannot hand off: the error names the reason."""
    tls = pair.tls.client if pair.tls is not None else None
    async with open_client(pair.member_key, tls=tls) as http:
        prefill = await _connect(http, pair.prefill_url, pair.prefill_kvd_url)
        decode = await _connect(http, pair.decode_url, pair.decode_kvd_url)
        if decode.kvd is None:
            raise InputError(
                f"{decode.url} does not report the URL of its kvd",
                where="--decode-kvd",
                fix="give the URL",
            )
        return await _SingleHandoff(prefill, decode, decode.kvd, request, clock).run()


class _Node:
    """A node and its kvd."""

    def __init__(self, http: HttpClient, url: str, model: str, kvd: KvdClient | None) -> None:
        self.url = url
        self.kvd = kvd
        self._http = http
        self._model = model

    async def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"temperature": 0.0, "return_token_ids": True, **fields}
        return await self._post("/v1/completions", body, _TIMEOUTS.prefill_s)

    async def tokenize(self, text: str) -> list[int]:
        ids: list[int] = (
            await self._post("/tokenize", {"prompt": text}, _TIMEOUTS.node_poll_timeout_s)
        )["tokens"]
        return ids

    async def _post(self, path: str, fields: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        body = msgspec.json.encode({"model": self._model, **fields})
        return await self._http.request_json(
            "POST", f"{self.url}{path}", dict[str, Any], timeout_s=timeout_s, body=body
        )


async def _connect(http: HttpClient, url: str, kvd_url: str | None) -> _Node:
    models = await http.request_json(
        "GET", f"{url}/v1/models", dict[str, Any], timeout_s=_TIMEOUTS.node_poll_timeout_s
    )
    card = models["data"][0]
    kvd_url = kvd_url or (card.get("prfaas") or {}).get("kvd_url")
    return _Node(http, url, card["id"], None if kvd_url is None else KvdClient(http, kvd_url))


class _SingleHandoff:
    def __init__(
        self,
        prefill: _Node,
        decode: _Node,
        receiver: KvdClient,
        request: HandoffRequest,
        clock: Clock,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._receiver = receiver
        self._request = request
        self._clock = clock
        self._began_s = clock.now()
        self._steps: list[HandoffStep] = []
        self._skip_tokens: dict[str, int] = {}
        self._prefill_cached: int | None = None

    async def run(self) -> HandoffReport:
        request = self._request
        prompt = request.prompt
        ids = await self._decode.tokenize(prompt) if isinstance(prompt, str) else prompt
        fields: dict[str, Any] = {"prompt": ids, "max_tokens": request.max_tokens}
        if request.salt:  # vLLM refuses an empty one
            fields["cache_salt"] = request.salt
        compat = await _compat(self._receiver)
        length = self._length(len(ids), compat.block_tokens)
        transfer: dict[str, Any] = {}
        self._began_s = self._clock.now()
        if length:
            sender = compat if self._prefill.kvd is None else await _compat(self._prefill.kvd)
            hashes = block_hashes(ids[:length], compat.block_tokens, salt=request.salt)
            grant = await self._open(OpenTransfer(tuple(hashes), length, sender))
            await self._transfer(grant, fields, length)
            transfer = {"kv_transfer_params": encode(RemotePrefill(grant.transfer_id))}
        with self._step("decode") as step:
            answer = await self._decode.complete(**fields, **request.decode_fields, **transfer)
            step.note = f"{answer['usage']['completion_tokens']} tokens; {_cached(answer)}"
        (choice,) = answer["choices"]
        report = HandoffReport(
            len(ids),
            length,
            self._steps,
            choice["token_ids"],
            choice["text"],
            logprobs=(choice.get("logprobs") or {}).get("token_logprobs"),
            skip_tokens=self._skip_tokens,
            prefill_cached=self._prefill_cached,
            decode_cached=_cached_tokens(answer),
        )
        if request.compare:
            with self._step("compare"):
                # A new salt, so that the prefill node computes the whole prompt again.
                unused = secrets.token_hex(8)
                computed = await self._prefill.complete(**{**fields, "cache_salt": unused})
            report.expected = computed["choices"][0]["token_ids"]
        return report

    def _length(self, prompt_tokens: int, block_tokens: int) -> int:
        wanted = self._request.handoff_tokens
        if wanted is None:
            return choose_handoff(prompt_tokens, block_tokens, resumable=False).handoff_tokens
        if not 0 <= wanted < prompt_tokens:
            raise InputError(
                f"{wanted} of {prompt_tokens} tokens cannot be handed off",
                where="handoff_tokens",
                fix="leave at least the last token to the decode node",
            )
        return wanted

    async def _open(self, transfer: OpenTransfer) -> Grant:
        with self._step("grant") as step:
            grant = await self._receiver.open(transfer)
            if isinstance(grant, NotNow):
                raise InputError(
                    f"the kvd grants no memory now: {grant.reason}",
                    where=self._receiver.url,
                    fix=f"try again in {grant.retry_after_s:g} s",
                )
            held = ", ".join(f"{tokens} of {group}" for group, tokens in grant.skip_tokens.items())
            self._skip_tokens = dict(grant.skip_tokens)
            step.nbytes = grant.max_bytes
            step.note = f"at most, to {grant.data_address}; tokens cached there: {held or 'none'}"
        return grant

    async def _transfer(self, grant: Grant, fields: dict[str, Any], length: int) -> None:
        """Prefills and waits for the commit. The receiver may commit before the prefill node has
        responded, so both are awaited at once."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._compute(grant, fields, length))
                committing = group.create_task(self._commit(grant))
        except BaseExceptionGroup as errors:  # the first error is the cause of the others
            with suppress(PeerError):  # the receiver frees the memory now instead of by timeout
                await self._receiver.abort(grant.transfer_id, "the hand-off failed")
            raise errors.exceptions[0] from None
        if self._prefill.kvd is not None:
            sent = await self._prefill.kvd.transfer(grant.transfer_id)
            commit = committing.result()
            commit.nbytes, commit.note = sent.nbytes, "sent"

    async def _compute(self, grant: Grant, fields: dict[str, Any], length: int) -> None:
        params = encode(RemoteDecode(grant, length))
        prompt = fields["prompt"][:length]
        with self._step("prefill") as step:
            answer = await self._prefill.complete(
                **{**fields, "prompt": prompt, "max_tokens": 1}, kv_transfer_params=params
            )
            found = msgspec.convert(answer.get("kv_transfer_params") or {}, ResponseParams)
            if found.error:
                raise InputError(
                    f"{found.error.code}: {found.error.message}", where=self._prefill.url
                )
            self._prefill_cached = _cached_tokens(answer)
            step.note = f"{length} tokens; {_cached(answer)}"

    async def _commit(self, grant: Grant) -> HandoffStep:
        with self._step("commit") as step:
            await self._receiver.wait_committed(grant.transfer_id)
        return step

    @contextmanager
    def _step(self, name: str) -> Iterator[HandoffStep]:
        step = HandoffStep(name, self._clock.now() - self._began_s)
        self._steps.append(step)
        try:
            yield step
        finally:
            step.took_s = self._clock.now() - self._began_s - step.began_s


def _cached_tokens(answer: dict[str, Any]) -> int | None:
    # vLLM reports this number only with --enable-prompt-tokens-details.
    details = answer["usage"].get("prompt_tokens_details") or {}
    cached: int | None = details.get("cached_tokens")
    return cached


def _cached(answer: dict[str, Any]) -> str:
    cached = _cached_tokens(answer)
    return "cached tokens not reported" if cached is None else f"{cached} prompt tokens cached"


async def _compat(kvd: KvdClient) -> Compat:
    pool = (await kvd.stats()).pool
    if pool is None:
        raise InputError(
            "no engine has registered with this kvd", where=kvd.url, fix="start its engine first"
        )
    return pool.compat
