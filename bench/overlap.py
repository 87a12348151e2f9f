"""The share of a hand-off's transfer that overlaps with its prefill, with real engines and kvds.

\b
    python -m prfaas_lab bench overlap [--rounds 5] [--vllm-python .venv-vllm/bin/python]

A prefill node with its kvd hands off to a second kvd through the user-space relay (`prfaas wan`).
The relay's rate is set so that the transfer lasts `--ratio` times the latest prefills. Every round
hands off one prompt chunk by chunk during its prefill, and another prompt of the same length after
its prefill has ended (`testing.ready_gate`). Both use the same processes and the same link, and the
order alternates. Prints JSON, per engine, with medians and the list of the rounds:

\b
  earlier_share  how much earlier the receiver commits, over the transfer's time
  hidden_share   the share of the transfer's time that does not remain after the prefill's end

Engines: `hf` (`prfaas node`), and `vllm` with PrfaasConnector if an interpreter with vLLM is given.
Both run the same checkpoint, on one core.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import click
import msgspec

import prfaas
from prfaas.cache.hashing import block_hashes
from prfaas.clock import Clock, MonotonicClock
from prfaas.config.address import Address, parse_address
from prfaas.contracts.kvd_api import OpenTransfer, TransferStatus, spec_of
from prfaas.contracts.readiness import NodeReady, parse_readiness
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.messages import Register
from prfaas.launch.attached_process import attached_kvd
from prfaas.types import Grant, NotNow
from prfaas.wan.path import Conditions
from prfaas.wan.relay import Relay
from prfaas_lab.testing.ready_gate import ReadyGate

ARCH = "falcon-h1"  # a hybrid model that both engines can run
FEWEST_CHUNKS = 8
RECENT = 3  # prefills whose median time sets the link's rate, after one for warm-up
KVD_OPTIONS = ("--memory", "1GiB", "--log-level", "warning")
VLLM_CACHE_BYTES = 512 << 20
START_S = 300.0
REQUEST_S = 120.0
_VOCABULARY = range(256)  # byte-level ids, which exist in the checkpoint's tokenizer


@dataclass(frozen=True, slots=True)
class Served:
    """An engine's HTTP API: its URL, and its Unix socket if it listens on one."""

    url: str
    socket: Path | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """The times of one hand-off, in seconds since the request."""

    prefill_s: float
    commit_s: float  # commit at the receiver
    nbytes: int

    @property
    def exposed_s(self) -> float:
        return self.commit_s - self.prefill_s


class Pair:
    """An engine with its kvd, and the kvd that receives. Does the gateway's work between them."""

    def __init__(
        self,
        served: Served,
        gate: ReadyGate,
        source_url: str,
        target_url: str,
        receiver: KvdClient,
        compat_of: Register,
        clock: Clock,
    ) -> None:
        self._served = served
        self._gate = gate
        self._source_url = source_url
        self._target_url = target_url
        self._receiver = receiver
        self._compat = compat_of.compat
        self._clock = clock

    async def hand_off(self, prompt: list[int], *, at_the_end: bool, relay: Relay) -> Timed:
        self._gate.holding = at_the_end
        async with aiohttp.ClientSession() as kvds, _session(self._served) as engine:
            grant = await self._open(kvds, prompt)
            grant = msgspec.structs.replace(grant, data_address=str(relay.address))
            began_s = self._clock.now()
            prefilling = asyncio.create_task(self._prefill(engine, prompt, grant))
            committing = asyncio.create_task(self._committed(kvds, grant))
            committed_s, _ = await asyncio.gather(committing, prefilling)
            sent = await _ask(kvds, "GET", f"{self._source_url}/v1/transfers/{grant.transfer_id}")
        self._receiver.attach(grant.transfer_id).release()
        ended_s = self._gate.commits.get(timeout=REQUEST_S)
        nbytes = msgspec.convert(sent, TransferStatus).nbytes
        return Timed(ended_s - began_s, committed_s - began_s, nbytes)

    async def data_address(self) -> Address:
        async with aiohttp.ClientSession() as kvds:
            stats = await _ask(kvds, "GET", f"{self._target_url}/v1/stats")
        return parse_address(stats["data_address"], "the receiver")

    async def _open(self, kvds: aiohttp.ClientSession, prompt: list[int]) -> Grant:
        hashes = tuple(block_hashes(prompt, self._compat.block_tokens))
        asked = OpenTransfer(hashes, len(prompt), self._compat)
        raw = await _ask(kvds, "POST", f"{self._target_url}/v1/open", msgspec.to_builtins(asked))
        answer = msgspec.convert(raw, Grant | NotNow)
        if isinstance(answer, NotNow):
            raise InputError(
                f"the kvd refused the grant: {answer.reason}", fix="hand off fewer --tokens"
            )
        return answer

    async def _prefill(
        self, engine: aiohttp.ClientSession, prompt: list[int], grant: Grant
    ) -> None:
        params = {
            "do_remote_decode": True,
            "grant": msgspec.to_builtins(grant),
            "handoff_tokens": len(prompt),
        }
        body = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": params}
        await _ask(engine, "POST", f"{self._served.url}/v1/completions", body)

    async def _committed(self, kvds: aiohttp.ClientSession, grant: Grant) -> float:
        url = f"{self._target_url}/v1/transfers/{grant.transfer_id}?wait_s={REQUEST_S:g}"
        raw = await _ask(kvds, "GET", url)
        at_s = self._clock.now()
        status = msgspec.convert(raw, TransferStatus)
        if status.state != "committed":
            raise InputError(f"the transfer is {status.state}: {status.reason}", where=url)
        return at_s


@dataclass(frozen=True, slots=True)
class Round:
    """One hand-off of each variant over the same link."""

    link_bps: float
    chunk_wise: Timed
    at_the_end: Timed

    @property
    def transfer_s(self) -> float:
        """The wait after the prefill when the whole transfer starts at its end."""
        return self.at_the_end.exposed_s

    @property
    def earlier_share(self) -> float:
        return (self.at_the_end.commit_s - self.chunk_wise.commit_s) / self.transfer_s

    @property
    def hidden_share(self) -> float:
        return 1 - self.chunk_wise.exposed_s / self.transfer_s

    @property
    def transfer_over_prefill(self) -> float:
        return self.transfer_s / self.at_the_end.prefill_s


def measure(pair: Pair, tokens: int, rounds: int, ratio: float, rtt_ms: float) -> dict[str, Any]:
    source = random.Random(0)
    prefills_s: list[float] = []

    def timed(*, at_the_end: bool, relay: Relay) -> Timed:
        prompt = source.choices(_VOCABULARY, k=tokens)  # a new prompt: no cache has it
        one = asyncio.run(pair.hand_off(prompt, at_the_end=at_the_end, relay=relay))
        prefills_s.append(one.prefill_s)
        return one

    target = asyncio.run(pair.data_address())
    found: list[Round] = []
    with Relay(Address("127.0.0.1", 0), target, Conditions(rtt_s=rtt_ms / 1e3)) as relay:
        warm = [timed(at_the_end=False, relay=relay) for _ in range(1 + RECENT)]
        for number in range(rounds):
            # Set before every round: on a shared machine, the prefill's time drifts.
            prefill_s = statistics.median(prefills_s[-RECENT:])
            link_bps = warm[0].nbytes * 8 / (ratio * prefill_s)
            relay.change(Conditions(rate_bps=link_bps, rtt_s=rtt_ms / 1e3))
            if number % 2:
                chunk_wise = timed(at_the_end=False, relay=relay)
                found.append(Round(link_bps, chunk_wise, timed(at_the_end=True, relay=relay)))
            else:
                at_the_end = timed(at_the_end=True, relay=relay)
                found.append(Round(link_bps, timed(at_the_end=False, relay=relay), at_the_end))
    return {"transfer_bytes": warm[0].nbytes, "rtt_ms": rtt_ms, **summary(found)}


def summary(rounds: list[Round]) -> dict[str, Any]:
    names = ("transfer_over_prefill", "earlier_share", "hidden_share")
    shares = {name: [getattr(one, name) for one in rounds] for name in names}
    return {
        **{name: round(statistics.median(found), 3) for name, found in shares.items()},
        "rounds": [
            {
                "link_mbps": round(one.link_bps / 1e6, 1),
                "prefill_s": [round(x.prefill_s, 3) for x in (one.chunk_wise, one.at_the_end)],
                "commit_s": [round(x.commit_s, 3) for x in (one.chunk_wise, one.at_the_end)],
                **{name: round(getattr(one, name), 3) for name in names},
            }
            for one in rounds
        ],
    }


# Processes ----------------------------------------------------------------------------------------


@contextmanager
def hf_node(model: Path, gate: Path, chunk_tokens: int, folder: Path) -> Iterator[Served]:
    command = [sys.executable, "-m", "prfaas", "node", "--model", str(model), "--kvd", str(gate)]
    command += ["--set", f"node.chunk_tokens={chunk_tokens}", "--device", "cpu"]
    log = folder / "node.log"
    with _process(command, {"OMP_NUM_THREADS": "1"}, log) as process:
        ready = _waited(process, log, lambda: _node_ready(log))
        yield Served(ready.http)


def _node_ready(log: Path) -> NodeReady | None:
    lines = log.read_text().splitlines()
    return next(filter(None, (parse_readiness(line, NodeReady) for line in lines)), None)


@contextmanager
def vllm_server(
    python: Path, model: Path, gate: Path, chunk_tokens: int, tokens: int, folder: Path
) -> Iterator[Served]:
    transfer = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvd": str(gate)},
    }
    path, log = folder / "vllm.http", folder / "vllm.log"
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--uds", str(path), "--enforce-eager", "--dtype", "float32"]
    command += ["--no-enable-prefix-caching", "--max-num-batched-tokens", str(chunk_tokens)]
    command += ["--max-model-len", str(tokens + chunk_tokens)]
    command += ["--kv-cache-memory-bytes", str(VLLM_CACHE_BYTES)]
    command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {
        # Use this checkout's connector, even if that environment has another one installed.
        "PYTHONPATH": str(Path(prfaas.__file__).parents[1]),
        "VLLM_CPU_OMP_THREADS_BIND": str(max(os.sched_getaffinity(0))),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    with _process(command, environment, log) as process:
        served = Served("http://vllm", path)
        _waited(process, log, lambda: path.exists() and asyncio.run(_healthy(served)))
        yield served


@contextmanager
def _process(
    command: list[str], environment: dict[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env={**os.environ, **environment}, stdout=out, stderr=subprocess.STDOUT
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _waited(process: subprocess.Popen[bytes], log: Path, ready: Any) -> Any:
    until_s = time.monotonic() + START_S
    while not (found := ready()):
        if process.poll() is not None or time.monotonic() > until_s:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
            raise InputError(f"the engine did not start:\n{tail}", where=str(process.args))
        time.sleep(0.2)
    return found


def _session(served: Served) -> aiohttp.ClientSession:
    connector = aiohttp.UnixConnector(str(served.socket)) if served.socket is not None else None
    return aiohttp.ClientSession(connector=connector)


async def _healthy(served: Served) -> bool:
    try:
        async with _session(served) as http, http.get(f"{served.url}/health") as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def _ask(http: aiohttp.ClientSession, method: str, url: str, body: Any = None) -> Any:
    timeout = aiohttp.ClientTimeout(total=2 * REQUEST_S)
    async with http.request(method, url, json=body, timeout=timeout) as answer:
        data = await answer.read()
    if answer.status != 200:
        raise InputError(f"HTTP {answer.status}: {data.decode(errors='replace')}", where=url)
    return msgspec.json.decode(data)


@click.command(help=__doc__)
@click.option("--tokens", default=4096, show_default=True, help="Tokens of each prompt.")
@click.option(
    "--chunk-tokens", default=256, show_default=True, help="Tokens of one step of the engine."
)
@click.option("--rounds", default=5, show_default=True, help="Measurements of each variant.")
@click.option("--ratio", default=0.8, show_default=True, help="Transfer time over prefill time.")
@click.option("--rtt-ms", default=20.0, show_default=True, help="Round trip of the link.")
@click.option(
    "--vllm-python",
    type=click.Path(path_type=Path, exists=True),
    help="Python with vLLM, to measure vLLM too.",
)
def main(
    tokens: int,
    chunk_tokens: int,
    rounds: int,
    ratio: float,
    rtt_ms: float,
    vllm_python: Path | None,
) -> None:
    if tokens < FEWEST_CHUNKS * chunk_tokens:
        raise InputError(
            f"{tokens} tokens are fewer than {FEWEST_CHUNKS} chunks of {chunk_tokens}",
            where="--tokens",
            fix=f"give {FEWEST_CHUNKS * chunk_tokens} or more, or smaller --chunk-tokens",
        )
    results: dict[str, Any] = {
        "model": ARCH,
        "tokens": tokens,
        "chunks": -(-tokens // chunk_tokens),
    }
    clock = MonotonicClock()
    with tempfile.TemporaryDirectory(prefix="prfaas-") as name:
        folder = Path(name)
        model = make_checkpoint(folder / "model", ARCH).directory
        for engine in ("hf", "vllm"):
            if engine == "vllm" and vllm_python is None:
                results[engine] = "not run: no --vllm-python was given"
                continue
            with ExitStack() as stack:
                source = stack.enter_context(attached_kvd(KVD_OPTIONS, 0.0))
                target = stack.enter_context(attached_kvd(KVD_OPTIONS, 0.0))
                assert source.url is not None and target.url is not None
                gate = stack.enter_context(
                    ReadyGate(folder / f"{engine}.kvd", source.socket, clock)
                )
                if vllm_python is not None and engine == "vllm":
                    serving = vllm_server(
                        vllm_python, model, gate.path, chunk_tokens, tokens, folder
                    )
                else:
                    serving = hf_node(model, gate.path, chunk_tokens, folder)
                served = stack.enter_context(serving)
                known = gate.registered.get(timeout=START_S)
                receiver = stack.enter_context(
                    KvdClient(
                        target.socket,
                        engine_id="receiver",
                        spec=spec_of(known.groups),
                        block_tokens=known.block_tokens,
                        compat=known.compat,
                        whole_blocks=known.whole_blocks,
                    )
                )
                pair = Pair(served, gate, source.url, target.url, receiver, known, clock)
                results[engine] = measure(pair, tokens, rounds, ratio, rtt_ms)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
