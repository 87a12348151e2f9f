"""One hand-off from A to B of a pair, without a gateway: grant, prefill, commit, decode in turn.

`prfaas doctor pair --try` shows the time and the bytes of every step, and whether the decode node B
answers as the prefill node A does, when that computes the whole prompt cut at the same lengths
(`handoff_comparison`). The gateway overlaps, retries and schedules hand-offs; this module does none
of that (`prfaas.gateway.dispatch`).
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
from prfaas.contracts.forms import choose_compat, compats_of
from prfaas.contracts.kv_transfer_params import (
    Reference,
    RemoteDecode,
    RemotePrefill,
    ResponseParams,
    encode,
)
from prfaas.contracts.kvd_api import OpenTransfer
from prfaas.engine.api import MAX_CUTS
from prfaas.errors import InputError, PeerError, PeerHttpError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.http_client.client import HttpClient
from prfaas.scheduler.handoff import choose_handoff
from prfaas.studies.handoff_comparison import (
    LOGPROB_FIELDS,
    Answer,
    AnswerComparison,
    compare_cut_alike,
    compare_cut_otherwise,
)
from prfaas.studies.pair_check import EnginePair, Server, find_server, no_engine
from prfaas.types import Compat, Form, Grant, NotNow

_TIMEOUTS = DEFAULTS.timeouts


@dataclass(frozen=True, slots=True)
class HandoffRequest:
    prompt: list[int]
    max_tokens: int
    # Empty: no salt, or with `compare` an unused one, so that nothing cached is resumed from. Where
    # cached state was cut is not known.
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
    form: Form | None  # in which the state travelled; None without a hand-off
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
    comparison: AnswerComparison | None = None  # None without `compare`

    @property
    def sent_bytes(self) -> int | None:
        """None without a hand-off."""
        return next((step.nbytes for step in self.steps if step.name == "commit"), None)

    def as_dict(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


async def run_handoff(pair: EnginePair, request: HandoffRequest, clock: Clock) -> HandoffReport:
    """Raises `PeerError` when a process does not respond or fails, and `InputError` when the pair
    cannot hand off: the error names the reason."""
    async with pair.client() as http:
        prefill = await _connect(http, pair.url_a, pair.kvd_a)
        decode = await _connect(http, pair.url_b, pair.kvd_b)
        return await _SingleHandoff(prefill, decode, request, clock).run()


class _Node:
    """A node and its kvd."""

    def __init__(self, http: HttpClient, url: str, server: Server, kvd: KvdClient) -> None:
        self.url = url
        self.kvd = kvd
        self.is_prfaas = server.is_prfaas
        self._http = http
        self._model = server.model

    async def complete(self, **fields: Any) -> dict[str, Any]:
        request = {"model": self._model, "temperature": 0.0, "return_token_ids": True, **fields}
        return await self._http.request_json(
            "POST",
            f"{self.url}/v1/completions",
            dict[str, Any],
            timeout_s=_TIMEOUTS.prefill_s,
            body=msgspec.json.encode(request),
        )

    async def complete_with_logprobs(self, **fields: Any) -> dict[str, Any]:
        """With log-probabilities if the server has them: its operator may have turned them off."""
        try:
            return await self.complete(**{**LOGPROB_FIELDS, **fields})
        except PeerHttpError as error:
            if error.status != 400:
                raise
            return await self.complete(**fields)


async def _connect(http: HttpClient, url: str, kvd_url: str | None) -> _Node:
    server = await find_server(http, url)
    if server is None:
        raise InputError(
            "this is not the server of an engine",
            where=url,
            fix="give the URL of a prfaas node or of a vLLM server",
        )
    kvd_url = kvd_url or server.kvd_url
    if kvd_url is None:
        raise InputError(
            "this server does not report the URL of its kvd",
            where=url,
            fix="give it with --kvd-a or --kvd-b",
        )
    return _Node(http, url, server, KvdClient(http, kvd_url))


class _SingleHandoff:
    def __init__(
        self,
        prefill: _Node,
        decode: _Node,
        request: HandoffRequest,
        clock: Clock,
    ) -> None:
        self._prefill = prefill
        self._decode = decode
        self._request = request
        self._clock = clock
        self._began_s = clock.now()
        self._steps: list[HandoffStep] = []
        self._skip_tokens: dict[str, int] = {}
        self._prefill_cached: int | None = None
        self._prefill_cuts: tuple[int, ...] | None = None  # None: not reported

    async def run(self) -> HandoffReport:
        request = self._request
        ids = request.prompt
        fields: dict[str, Any] = {"prompt": ids, "max_tokens": request.max_tokens}
        salt = request.salt or (_unused_salt() if request.compare else "")
        if salt:  # vLLM refuses an empty one
            fields["cache_salt"] = salt
        compat = await self._choose_compat()
        length = self._length(len(ids), compat.block_tokens)
        transfer: dict[str, Any] = {}
        self._began_s = self._clock.now()
        if length:
            hashes = block_hashes(ids[:length], compat.block_tokens, salt=salt)
            grant = await self._open(OpenTransfer(tuple(hashes), length, compat))
            await self._transfer(grant, fields, length)
            continued = RemotePrefill(grant.transfer_id, grant.form, request.compare)
            transfer = {"kv_transfer_params": encode(continued)}
        with self._step("decode") as step:
            complete = self._decode.complete
            if self._wants_logprobs:
                complete = self._decode.complete_with_logprobs
            answer = await complete(**fields, **request.decode_fields, **transfer)
            step.note = f"{answer['usage']['completion_tokens']} tokens; {_cached(answer)}"
        (choice,) = answer["choices"]
        report = HandoffReport(
            len(ids),
            length,
            compat.form if length else None,
            self._steps,
            choice["token_ids"],
            choice["text"],
            logprobs=(choice.get("logprobs") or {}).get("token_logprobs"),
            skip_tokens=self._skip_tokens,
            prefill_cached=self._prefill_cached,
            decode_cached=_cached_tokens(answer),
        )
        if request.compare:
            cuts, reason = self._handoff_cuts(len(ids), length, _cuts(answer))
            with self._step("compare") as step:
                expected = await self._reference(fields, cuts)
                step.note = _cached(expected)
            (reference,) = expected["choices"]
            report.expected = reference["token_ids"]
            if cuts is not None and _cuts(expected) != cuts:
                reason = f"{self._prefill.url} did not cut the reference where the hand-off was cut"
            if cuts is None or reason:
                report.comparison = compare_cut_otherwise(
                    Answer.of(choice), Answer.of(reference), dtype=compat.kv_dtype, reason=reason
                )
            else:
                report.comparison = compare_cut_alike(Answer.of(choice), Answer.of(reference), cuts)
        return report

    @property
    def _wants_logprobs(self) -> bool:
        both_have = not (self._prefill.is_prfaas or self._decode.is_prfaas)
        return self._request.compare and both_have

    def _handoff_cuts(
        self, prompt_tokens: int, length: int, decode_cuts: tuple[int, ...] | None
    ) -> tuple[tuple[int, ...] | None, str]:
        """Where the two nodes have cut the prompt, its end included; or None and the reason."""
        if not length:
            return None, "nothing was handed off"
        for url, cuts in ((self._prefill.url, self._prefill_cuts), (self._decode.url, decode_cuts)):
            if cuts is None:
                return None, f"{url} does not report where it cuts a prompt"
        assert self._prefill_cuts is not None and decode_cuts is not None
        if self._prefill_cached or any(self._skip_tokens.values()):
            return None, "cached state was resumed from, and where that was cut is not known"
        found = tuple(sorted({*self._prefill_cuts, *decode_cuts}))
        if length not in found or found[-1] != prompt_tokens:
            return None, "the reports of the two nodes do not belong to this prompt"
        if len(found) > MAX_CUTS:
            return None, f"a prompt with {len(found)} cuts cannot be repeated"
        return found, ""

    async def _reference(
        self, fields: dict[str, Any], cuts: tuple[int, ...] | None
    ) -> dict[str, Any]:
        """The prefill node's answer to the whole prompt. With a new salt, so that a server that
        does not know references computes the whole prompt again, too."""
        fields = {**fields, "cache_salt": _unused_salt()}
        if cuts is not None:
            return await self._prefill.complete(
                **fields, kv_transfer_params=encode(Reference(cuts[:-1]))
            )
        if self._wants_logprobs:
            return await self._prefill.complete_with_logprobs(**fields)
        return await self._prefill.complete(**fields)

    async def _choose_compat(self) -> Compat:
        """The format of the hand-off. Where the nodes have none in common it is the sender's: the
        receiver's refusal then names the differences."""
        sender = await _compats(self._prefill.kvd)
        receiver = await _compats(self._decode.kvd)
        return choose_compat(sender, receiver) or sender[0]

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
            grant = await self._decode.kvd.open(transfer)
            if isinstance(grant, NotNow):
                raise InputError(
                    f"the kvd grants no memory now: {grant.reason}",
                    where=self._decode.kvd.url,
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
                await self._decode.kvd.abort(grant.transfer_id, "the hand-off failed")
            raise errors.exceptions[0] from None
        sent = await self._prefill.kvd.transfer(grant.transfer_id)
        commit = committing.result()
        commit.nbytes, commit.note = sent.nbytes, "sent"

    async def _compute(self, grant: Grant, fields: dict[str, Any], length: int) -> None:
        params = encode(RemoteDecode(grant, length, self._request.compare))
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
            self._prefill_cuts = _cuts(answer)
            step.note = f"{length} tokens; {_cached(answer)}"

    async def _commit(self, grant: Grant) -> HandoffStep:
        with self._step("commit") as step:
            await self._decode.kvd.wait_committed(grant.transfer_id)
        return step

    @contextmanager
    def _step(self, name: str) -> Iterator[HandoffStep]:
        step = HandoffStep(name, self._clock.now() - self._began_s)
        self._steps.append(step)
        try:
            yield step
        finally:
            step.took_s = self._clock.now() - self._began_s - step.began_s


def _unused_salt() -> str:
    return secrets.token_hex(8)


def _cuts(answer: dict[str, Any]) -> tuple[int, ...] | None:
    try:
        found = msgspec.convert(answer.get("kv_transfer_params") or {}, ResponseParams)
    except msgspec.ValidationError:
        return None  # of a server that uses the field otherwise
    return None if found.cut_tokens is msgspec.UNSET else found.cut_tokens


def _cached_tokens(answer: dict[str, Any]) -> int | None:
    # vLLM reports this number only with --enable-prompt-tokens-details.
    details = answer["usage"].get("prompt_tokens_details") or {}
    cached: int | None = details.get("cached_tokens")
    return cached


def _cached(answer: dict[str, Any]) -> str:
    cached = _cached_tokens(answer)
    return "cached tokens not reported" if cached is None else f"{cached} prompt tokens cached"


async def _compats(kvd: KvdClient) -> tuple[Compat, ...]:
    compats = compats_of(await kvd.stats())
    if not compats:
        raise no_engine(kvd.url)
    return compats
