"""`prfaas handoff`: plays the gateway for one request and shows every step of the hand-off."""

from __future__ import annotations

import asyncio
import random
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

from prfaas.cache.hashing import block_hashes
from prfaas.clock import Clock, MonotonicClock
from prfaas.config.gateway import DEFAULTS
from prfaas.contracts.kv_transfer_params import RemoteDecode, RemotePrefill, ResponseParams, encode
from prfaas.contracts.kvd_api import OpenTransfer
from prfaas.display.console import console, print_json
from prfaas.errors import ConnectionLost, InputError, PeerError, PeerHttpError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.http_client.client import HttpClient, open_client
from prfaas.scheduler.handoff import choose_handoff as handoff_length
from prfaas.security.deployment_key import read_deployment_key
from prfaas.types import Compat, Grant, NotNow

DEFAULT_MAX_TOKENS = 16
# Made-up prompts use ids that every vocabulary has, and that are text in a byte-level one.
_MADE_UP_IDS = range(32, 127)


@click.command()
@click.argument("prefill_url")
@click.argument("decode_url")
@click.option("--prompt", help="Text; the decode node tokenises it.")
@click.option("--tokens", type=int, help="Instead: a made-up prompt of so many tokens.")
@click.option("--seed", default=0, show_default=True, help="Of the made-up prompt.")
@click.option("--prefill-kvd", help="URL; a `prfaas node` knows its own.")
@click.option("--decode-kvd", help="URL; a `prfaas node` knows its own.")
@click.option("--kvd-key-file", type=click.Path(path_type=Path), help="Shared key of the kvds.")
@click.option("--max-tokens", default=DEFAULT_MAX_TOKENS, show_default=True)
@click.option("--salt", default="", help="The tenant's cache salt.")
@click.option("--compare", is_flag=True, help="Also answer on the prefill node alone, and compare.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def handoff(
    prefill_url: str,
    decode_url: str,
    prompt: str | None,
    tokens: int | None,
    seed: int,
    prefill_kvd: str | None,
    decode_kvd: str | None,
    kvd_key_file: Path | None,
    max_tokens: int,
    salt: str,
    compare: bool,
    as_json: bool,
) -> None:
    """Prefill one prompt at PREFILL_URL, hand its state over, and decode it at DECODE_URL.

    The first check of a new pair: grant, prefill, the transfer's commit and decode, each with its
    time and bytes. With --compare the same greedy answer is computed on the prefill node
    alone, and a difference is an error.

    \b
      prfaas handoff http://prefill:8000 http://decode:8000 --tokens 4000 --compare
      prfaas handoff http://p:8000 http://d:8000 --prompt "Once" --decode-kvd http://d:7000
    """
    if (prompt is None) == (tokens is None):
        raise InputError("which prompt?", fix="give either --prompt or --tokens")
    if tokens is not None and tokens < 1:
        raise InputError(f"{tokens}", where="--tokens", fix="give at least 1")
    text = (
        prompt if prompt is not None else random.Random(seed).choices(_MADE_UP_IDS, k=tokens or 1)
    )
    key = read_deployment_key(kvd_key_file) if kvd_key_file is not None else None
    pair = Pair(prefill_url.rstrip("/"), decode_url.rstrip("/"), prefill_kvd, decode_kvd, key)
    try:
        story = asyncio.run(_play(pair, text, max_tokens, salt, compare, MonotonicClock()))
    except PeerError as error:
        raise _mended(error) from None
    if as_json:
        print_json(story.as_dict())
    else:
        _show(story)
    if compare and story.expected != story.answer:
        raise click.ClickException("the hand-off changed the answer")


@dataclass(frozen=True, slots=True)
class Pair:
    prefill_url: str
    decode_url: str
    prefill_kvd: str | None
    decode_kvd: str | None
    kvd_key: str | None = field(repr=False)


@dataclass(slots=True)
class Step:
    name: str
    began_s: float
    took_s: float
    nbytes: int | None = None
    note: str = ""


@dataclass(slots=True)
class Story:
    """One hand-off, step by step; times count from its beginning."""

    prompt_tokens: int
    handoff_tokens: int
    steps: list[Step] = field(default_factory=list)
    answer: list[int] | None = None
    text: str = ""
    expected: list[int] | None = None

    def as_dict(self) -> dict[str, Any]:
        built: dict[str, Any] = msgspec.to_builtins(self)
        return built


class _Node:
    """A node and its kvd, as a gateway sees them. The kvds' key is for `kvds` alone."""

    def __init__(
        self, calls: HttpClient, kvds: HttpClient, url: str, card: dict[str, Any], kvd: str | None
    ) -> None:
        ours = card.get("prfaas") or {}
        kvd_url = kvd or ours.get("kvd_url")
        self.calls = calls
        self.url = url
        self.model = card["id"]
        self.kvd = None if kvd_url is None else KvdClient(kvds, kvd_url)

    async def complete(self, **fields: Any) -> dict[str, Any]:
        body = {"model": self.model, "temperature": 0.0, "return_token_ids": True, **fields}
        url = f"{self.url}/v1/completions"
        return await self.calls.request_json(
            "POST",
            url,
            dict[str, Any],
            timeout_s=DEFAULTS.timeouts.prefill_s,
            body=msgspec.json.encode(body),
        )


async def _play(
    pair: Pair, prompt: str | list[int], max_tokens: int, salt: str, compare: bool, clock: Clock
) -> Story:
    async with open_client() as calls, open_client(pair.kvd_key) as kvds:
        prefill = await _node(calls, kvds, pair.prefill_url, pair.prefill_kvd)
        decode = await _node(calls, kvds, pair.decode_url, pair.decode_kvd)
        ids = await _ids(decode, prompt)
        fields: dict[str, Any] = {"prompt": ids, "max_tokens": max_tokens}
        if salt:  # vLLM takes an empty one for a mistake
            fields["cache_salt"] = salt
        if decode.kvd is None:
            raise InputError(
                f"{decode.url} does not name its kvd", where="--decode-kvd", fix="give its URL"
            )
        compat = await _compat(decode.kvd)
        length = handoff_length(len(ids), compat.block_tokens, resumable=False)
        story = Story(len(ids), length.handoff_tokens)
        timer = _Timer(story, clock)
        transfer: dict[str, Any] = {}
        if length.handoff_tokens:
            sender = await _compat(prefill.kvd) if prefill.kvd is not None else compat
            hashes = block_hashes(ids[: length.handoff_tokens], compat.block_tokens, salt=salt)
            asked = OpenTransfer(tuple(hashes), length.handoff_tokens, sender)
            grant = await _open(decode.kvd, timer, asked)
            await _prefill(prefill, decode.kvd, timer, grant, fields, length.handoff_tokens)
            transfer = {"kv_transfer_params": encode(RemotePrefill(grant.transfer_id))}
        with timer.step("decode") as step:
            answer = await decode.complete(**fields, **transfer)
            step.note = f"{answer['usage']['completion_tokens']} tokens, {_cached(answer)}"
        (choice,) = answer["choices"]
        story.answer, story.text = choice["token_ids"], choice["text"]
        if compare:
            with timer.step("compare"):
                # Under an unused salt, so that the cached prefixes are not used.
                nobody = secrets.token_hex(8)
                alone = await prefill.complete(**{**fields, "cache_salt": nobody})
            story.expected = alone["choices"][0]["token_ids"]
    return story


async def _open(kvd: KvdClient, timer: _Timer, asked: OpenTransfer) -> Grant:
    with timer.step("grant") as step:
        answer = await kvd.open(asked)
        if isinstance(answer, NotNow):
            raise InputError(
                f"not now: {answer.reason}",
                where=kvd.url,
                fix=f"try again in {answer.retry_after_s:g} s",
            )
        held = ", ".join(f"{tokens} of {group}" for group, tokens in answer.skip_tokens.items())
        step.note = f"bytes at most; to {answer.data_address}; tokens held there: {held or 'none'}"
        step.nbytes = answer.max_bytes
    return answer


async def _prefill(
    prefill: _Node,
    receiver: KvdClient,
    timer: _Timer,
    grant: Grant,
    fields: dict[str, Any],
    handoff_tokens: int,
) -> None:
    """The commit is learnt at the receiver, while the prefill's own answer is under way."""
    params = encode(RemoteDecode(grant, handoff_tokens))
    asked = {**fields, "prompt": fields["prompt"][:handoff_tokens], "max_tokens": 1}

    async def compute() -> None:
        with timer.step("prefill") as step:
            answer = await prefill.complete(**asked, kv_transfer_params=params)
            found = msgspec.convert(answer.get("kv_transfer_params") or {}, ResponseParams)
            if found.error:
                raise InputError(f"{found.error.code}: {found.error.message}", where=prefill.url)
            step.note = f"{handoff_tokens} tokens, {_cached(answer)}"

    async def commit() -> Step:
        with timer.step("commit") as step:
            await receiver.wait_committed(grant.transfer_id)
        return step

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(compute())
            committing = group.create_task(commit())
    except BaseExceptionGroup as errors:  # prefill and commit fail together: the first says why
        with suppress(PeerError):  # what the receiver has reserved is of no use to anybody
            await receiver.abort(grant.transfer_id, "the hand-off failed")
        raise errors.exceptions[0] from None
    if prefill.kvd is not None:  # which knows of the transfer since the prefill has begun
        sent = await prefill.kvd.transfer(grant.transfer_id)
        committed = committing.result()
        committed.nbytes, committed.note = sent.nbytes, "bytes sent"


def _cached(answer: dict[str, Any]) -> str:
    """vLLM tells with --enable-prompt-tokens-details only."""
    details = answer["usage"].get("prompt_tokens_details") or {}
    cached = details.get("cached_tokens")
    return "cached tokens not told" if cached is None else f"{cached} of the prompt's cached"


async def _node(calls: HttpClient, kvds: HttpClient, url: str, kvd: str | None) -> _Node:
    models = await calls.request_json(
        "GET", f"{url}/v1/models", dict[str, Any], timeout_s=DEFAULTS.timeouts.node_poll_timeout_s
    )
    return _Node(calls, kvds, url, models["data"][0], kvd)


async def _ids(node: _Node, prompt: str | list[int]) -> list[int]:
    if not isinstance(prompt, str):
        return prompt
    body = msgspec.json.encode({"model": node.model, "prompt": prompt})
    url = f"{node.url}/tokenize"
    answer = await node.calls.request_json(
        "POST", url, dict[str, Any], timeout_s=DEFAULTS.timeouts.node_poll_timeout_s, body=body
    )
    ids: list[int] = answer["tokens"]
    return ids


async def _compat(kvd: KvdClient) -> Compat:
    pool = (await kvd.stats()).pool
    if pool is None:
        raise InputError(
            "no engine has registered there", where=kvd.url, fix="start its engine first"
        )
    return pool.compat


def _mended(error: PeerError) -> InputError:
    """For the person who has typed the addresses."""
    if isinstance(error, ConnectionLost):
        return InputError(f"no answer: {error}", fix="is it running?")
    if isinstance(error, PeerHttpError):
        return InputError(f"HTTP {error.status}: {error}")
    return InputError(str(error))


# Showing ------------------------------------------------------------------------------------------


class _Timing:
    def __init__(self, timer: _Timer, name: str) -> None:
        self._timer = timer
        self._name = name

    def __enter__(self) -> Step:
        self._step = Step(self._name, self._timer.now(), 0.0)
        self._timer.story.steps.append(self._step)
        return self._step

    def __exit__(self, *_: object) -> None:
        self._step.took_s = self._timer.now() - self._step.began_s


class _Timer:
    def __init__(self, story: Story, clock: Clock) -> None:
        self.story = story
        self._clock = clock
        self._began_s = clock.now()

    def now(self) -> float:
        return self._clock.now() - self._began_s

    def step(self, name: str) -> _Timing:
        return _Timing(self, name)


def _show(story: Story) -> None:
    screen = console()
    title = f"{story.prompt_tokens:,} tokens, {story.handoff_tokens:,} of them handed off"
    table = Table(title=title, title_justify="left")
    for column, justify in (
        ("step", "left"),
        ("began (ms)", "right"),
        ("took (ms)", "right"),
        ("bytes", "right"),
        ("", "left"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for step in story.steps:
        nbytes = "" if step.nbytes is None else f"{step.nbytes:,}"
        table.add_row(
            step.name, f"{step.began_s * 1e3:,.1f}", f"{step.took_s * 1e3:,.1f}", nbytes, step.note
        )
    screen.print(table)
    screen.print(f"answer: {story.text!r}", markup=False)
    if story.expected is not None:
        same = story.expected == story.answer
        screen.print("the same as on one node" if same else "NOT the answer of one node")
