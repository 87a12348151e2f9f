"""Part `live` of `bench/gpu.py`: hand-offs between two nodes on one device, token by token."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec

from _gpu_nodes import NodeProcess, NodeRack, metrics
from _gpu_options import GpuOptions
from prfaas.cache.hashing import block_hashes
from prfaas.contracts.forms import choose_compat, compats_of
from prfaas.contracts.kv_transfer_params import RemoteDecode, RemotePrefill, encode
from prfaas.contracts.kvd_api import OpenTransfer
from prfaas.errors import EngineError
from prfaas.gateway.client.kvd_client import KvdClient
from prfaas.http_client.client import HttpClient, open_client
from prfaas.scheduler.handoff import choose_handoff
from prfaas.types import Compat, Grant

TARGET_MS = 60.0
TOKENS, SHORT_TOKENS = 100_000, 1_000
SMALL_TOKENS, SMALL_SHORT_TOKENS = 600, 100
RUNS, SMALL_RUNS = 4, 2
ANSWER_TOKENS = 24
HANDOFF_S = 120.0
_DATA = b"data: "


@dataclass(slots=True)
class Handoff:
    """Times of one hand-off, in seconds since the prefill request was sent."""

    tokens: int
    left_tokens: int  # of the prompt, which the decode node computes
    nbytes: int = 0
    prefill_s: float = 0.0  # the prefill node's response
    commit_s: float = 0.0  # the receiving kvd's word that the transfer is committed
    token_s: list[float] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        step_s = statistics.median(
            after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)
        )
        first_s = self.token_s[0] - self.commit_s
        return {
            "tokens": self.tokens,
            "left_tokens": self.left_tokens,
            "megabytes": round(self.nbytes / 1e6, 1),
            "prefill_s": round(self.prefill_s, 4),
            "commit_after_prefill_ms": round(1e3 * (self.commit_s - self.prefill_s), 1),
            "first_token_after_commit_ms": round(1e3 * first_s, 1),
            "decode_step_ms": round(1e3 * step_s, 1),
            "over_a_step_ms": round(1e3 * (first_s - step_s), 1),
        }


class LivePair:
    """Two nodes and their kvds. Does what a gateway does: the decode request is sent when the
    commit arrives, and its body is ready then."""

    def __init__(self, http: HttpClient, prefill_url: str, decode_url: str) -> None:
        self._http = http
        self._prefill_url = prefill_url
        self._decode_url = decode_url

    async def connect(self) -> None:
        self._sender = KvdClient(self._http, await self._kvd_url(self._prefill_url))
        self._receiver = KvdClient(self._http, await self._kvd_url(self._decode_url))
        compat = choose_compat(
            compats_of(await self._sender.stats()), compats_of(await self._receiver.stats())
        )
        if compat is None:
            raise EngineError("the two nodes have no form in common")
        self._compat: Compat = compat

    async def hand_off(self, prompt: list[int], *, at_last: bool = False) -> Handoff:
        """Where a gateway would, or at the last token but one: what is left is then a step."""
        block_tokens = self._compat.block_tokens
        length = choose_handoff(len(prompt), block_tokens, resumable=False).handoff_tokens
        if at_last:
            length = len(prompt) - 1
        hashes = tuple(block_hashes(prompt[:length], block_tokens))
        grant = await self._receiver.open(OpenTransfer(hashes, length, self._compat))
        if not isinstance(grant, Grant):
            raise EngineError(f"the receiving kvd grants no memory: {grant.reason}")
        first = _body(prompt[:length], 1, encode(RemoteDecode(grant, length)), stream=False)
        continued = encode(RemotePrefill(grant.transfer_id, grant.form))
        second = _body(prompt, ANSWER_TOKENS, continued, stream=True)
        found = Handoff(length, len(prompt) - length)
        began_s = time.perf_counter()
        async with asyncio.timeout(HANDOFF_S), asyncio.TaskGroup() as group:
            group.create_task(self._prefill(first, found, began_s))
            await self._receiver.wait_committed(grant.transfer_id)
            found.commit_s = time.perf_counter() - began_s
            await self._decode(second, found, began_s)
        found.nbytes = (await self._sender.transfer(grant.transfer_id)).nbytes
        return found

    async def _prefill(self, body: bytes, found: Handoff, began_s: float) -> None:
        answer = await self._http.request_json(
            "POST",
            f"{self._prefill_url}/v1/completions",
            dict[str, Any],
            timeout_s=HANDOFF_S,
            body=body,
        )
        found.prefill_s = time.perf_counter() - began_s
        error = (answer.get("kv_transfer_params") or {}).get("error")
        if error:
            raise EngineError(f"the prefill node failed: {error}")

    async def _decode(self, body: bytes, found: Handoff, began_s: float) -> None:
        url = f"{self._decode_url}/v1/completions"
        exchange = await self._http.send("POST", url, body, total_s=HANDOFF_S)
        async with exchange:
            await exchange.check_status()
            unread = b""
            while (data := await exchange.read_some()) is not None:
                at_s = time.perf_counter() - began_s
                *lines, unread = (unread + data).split(b"\n")
                found.token_s += [at_s] * sum(map(_tokens, lines))
        if len(found.token_s) != ANSWER_TOKENS:
            raise EngineError(f"{len(found.token_s)} tokens arrived instead of {ANSWER_TOKENS}")

    async def _kvd_url(self, node_url: str) -> str:
        models = await self._http.request_json(
            "GET", f"{node_url}/v1/models", dict[str, Any], timeout_s=HANDOFF_S
        )
        url: str = models["data"][0]["prfaas"]["kvd_url"]
        return url


def measure(options: GpuOptions, rack: NodeRack | None = None) -> dict[str, Any]:
    own = rack is None
    rack = rack or NodeRack(options)
    try:
        prefill, decode = rack.nodes(2, options.end_s)
        return asyncio.run(_hand_offs(options, rack, prefill, decode))
    finally:
        if own:
            rack.close()


async def _hand_offs(
    options: GpuOptions, rack: NodeRack, prefill: NodeProcess, decode: NodeProcess
) -> dict[str, Any]:
    """One short hand-off first, which shows what is not due to the length; then long ones until
    there are enough or the time is used up, in turn where a gateway hands off and at the last token
    but one."""
    small = options.small
    runs: list[dict[str, Any]] = []
    results: dict[str, Any] = {"target_ms": TARGET_MS, "runs": runs}
    async with open_client() as http:
        pair = LivePair(http, prefill.url, decode.url)
        await pair.connect()
        short = SMALL_SHORT_TOKENS if small else SHORT_TOKENS
        handed = await pair.hand_off(rack.prompt(short, seed=2_000_000))
        results["short"] = handed.as_dict()
        options.keep("short", results["short"])
        for number in range(SMALL_RUNS if small else RUNS):
            # One more would take about as long as the one before.
            if runs and options.left_s < 2 * runs[-1]["prefill_s"]:
                break
            prompt = rack.prompt(SMALL_TOKENS if small else TOKENS, seed=2_000_001 + number)
            before = metrics(decode.url)
            handed = await pair.hand_off(prompt, at_last=bool(number % 2))
            after = metrics(decode.url)
            runs.append({**handed.as_dict(), "decode_node": _changes(before, after)})
            options.keep("runs", runs)
    later = runs[1:] or runs
    over_ms = [run["over_a_step_ms"] for run in later]
    results["over_a_step_ms_after_the_first"] = {
        "median": round(statistics.median(over_ms), 1),
        "largest": max(over_ms),
        "largest_with_one_token_left": max(
            (run["over_a_step_ms"] for run in later if run["left_tokens"] == 1), default=None
        ),
    }
    results["met"] = max(over_ms) <= TARGET_MS
    return results


def _body(prompt: list[int], max_tokens: int, transfer: Any, *, stream: bool) -> bytes:
    return msgspec.json.encode(
        {
            "model": "bench",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": stream,
            "return_token_ids": True,
            "kv_transfer_params": transfer,
        }
    )


def _tokens(line: bytes) -> int:
    """Tokens in a line of the stream."""
    if not line.startswith(_DATA) or line.startswith(b"data: [DONE]"):
        return 0
    piece = msgspec.json.decode(line[len(_DATA) :])
    if "error" in piece:
        raise EngineError(f"the decode node failed: {piece['error']}")
    return sum(len(choice.get("token_ids") or ()) for choice in piece["choices"])


def _changes(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the decode node's own counters of seconds say about the hand-off."""
    return {
        name.split("{")[0]: round(value - before.get(name, 0.0), 4)
        for name, value in after.items()
        if "seconds" in name and value != before.get(name, 0.0)
    }
