"""One hand-off between two nodes, without a gateway: grant, prefill, commit and decode in turn.

This is the check of a new pair of nodes: it shows the time and the bytes of every step, and whether
the decode node answers as the prefill node does, when that computes the whole prompt cut at the
same lengths (`handoff_comparison`). The gateway overlaps, retries and schedules hand-offs; this
module does none of that (`prfaas.gateway.dispatch`).
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
from prfaas.http_client.client import HttpClient, open_client
from prfaas.scheduler.handoff import choose_handoff
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import TlsIdentity
from prfaas.studies.handoff_comparison import (
    LOGPROB_FIELDS,
    Answer,
    AnswerComparison,
    compare_cut_alike,
    compare_cut_otherwise,
)
from prfaas.types import Compat, Form, Grant, NotNow

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
    # Empty: no salt, or with `compare` an unused one, so that nothing cached is resumed from. Where
    # cached state was cut is not known.
    salt: str = ""
    compare: bool = False  # whether the prefill node also computes the whole answer
    handoff_tokens: int | None = None  # None: as a gateway chooses it
    form: Form | None = None  # None: as a gateway chooses it
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

    def __init__(
        self, http: HttpClient, url: str, model: str, kvd: KvdClient | None, *, is_prfaas: bool
    ) -> None:
        self.url = url
        self.kvd = kvd
        self.is_prfaas = is_prfaas  # a `prfaas node`, which has no log-probabilities
        self._http = http
        self._model = model

    async def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"temperature": 0.0, "return_token_ids": True, **fields}
        return await self._post("/v1/completions", body, _TIMEOUTS.prefill_s)

    async def complete_with_logprobs(self, **fields: Any) -> dict[str, Any]:
        """With log-probabilities if the server has them: its operator may have turned them off."""
        try:
            return await self.complete(**{**LOGPROB_FIELDS, **fields})
        except PeerHttpError as error:
            if error.status != 400:
                raise
            return await self.complete(**fields)

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
    own = card.get("prfaas") or {}
    kvd_url = kvd_url or own.get("kvd_url")
    kvd = None if kvd_url is None else KvdClient(http, kvd_url)
    return _Node(http, url, card["id"], kvd, is_prfaas=bool(own))


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
        self._prefill_cuts: tuple[int, ...] | None = None  # None: not reported

    async def run(self) -> HandoffReport:
        request = self._request
        prompt = request.prompt
        ids = await self._decode.tokenize(prompt) if isinstance(prompt, str) else prompt
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
        wanted = self._request.form
        receiver = _of_form(await _compats(self._receiver), wanted, self._decode.url)
        if self._prefill.kvd is None:
            return receiver[0]
        sender = _of_form(await _compats(self._prefill.kvd), wanted, self._prefill.url)
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
        raise InputError(
            "no engine has registered with this kvd", where=kvd.url, fix="start its engine first"
        )
    return compats


def _of_form(compats: tuple[Compat, ...], form: Form | None, url: str) -> tuple[Compat, ...]:
    found = tuple(compat for compat in compats if form in (None, compat.form))
    if not found:
        raise InputError(
            f"the engine of {url} does not hand over in the {form} form",
            where="form",
            fix=f"use: {', '.join(compat.form for compat in compats)}",
        )
    return found
