"""Turns of a conversation that start where the last answer ended, with and without kept answers.

\b
    python -m prfaas_lab bench turns [--turns 10] [--answer-tokens 500] [--new-tokens 100]
                                     [--vllm-python .venv-vllm/bin/python]

Two deployments of the same tiny hybrid model, each with a PrfaaS node that prefills, a node that
decodes, and a gateway. In one the nodes keep answers (`node.keep_answers`), in the other they do
not. Every turn goes through both gateways as token ids, in alternating order: the prompt so far,
the answer of the first deployment, and new tokens. Every prompt is prefilled remotely; the links
are declared as fast, so that routes copy what the PrfaaS node lacks. Afterwards one node computes
every turn again without any cache. With `--vllm-python`, the interpreter of an environment with
vLLM and prfaas, the same conversation then goes through two deployments whose nodes are vLLM
servers with PrfaasConnector (tiny Falcon-H1 in float32 on the CPU, with vLLM's prefix cache); the
results are in `vllm`. Prints JSON:

\b
  computed_prompt_tokens  of a turn: prompt tokens less the cached ones of the response's usage
  new_tokens              of a turn: tokens that follow the last answer
  equal                   the answers of both deployments are those of the node without a cache
  ttft_ratio              time to first token without kept answers over that with them: the median
                          of the turns from the second on
  decode_cost             what copying states at block boundaries adds to the time of a token: the
                          best of several answers with it over the best without it, less 1
                          (`prfaas node` only)

Exits with code 1 when an answer differs, or when a turn after the first has computed more than its
new tokens and one block.
"""

from __future__ import annotations

import http.client
import json
import math
import random
import statistics
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import click

from _engine_rack import REQUEST_S, SETTLE_S, Child, post, say
from _turns_vllm import ARCH as VLLM_ARCH
from _turns_vllm import BLOCK_TOKENS as VLLM_BLOCK_TOKENS
from _turns_vllm import MAX_TOKENS as VLLM_MAX_TOKENS
from _turns_vllm import Node, computed_by_vllm, vllm_nodes
from _vllm_options import logs_option
from prfaas.contracts.readiness import GatewayReady, NodeReady
from prfaas.engine.api import (
    EngineJob,
    Event,
    Finished,
    JobFailed,
    KeepAnswer,
    Sampling,
    Token,
)
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.engine.hf import HFEngine, load_model
from prfaas.errors import InputError

BLOCK_TOKENS = 64
KVD_OPTIONS = ("--memory", "512MiB", "--log-level", "warning")
POLL_S = 0.1
_VOCABULARY = range(32, 127)  # byte-level ids, which exist in the checkpoint's tokenizer
# Routing needs a profile, and any will do: every prompt is above the threshold, and no copy takes
# long on these links.
_DEPLOYMENT = """
[model]
name = "case-study-1t"
[workload]
kind = "lognormal"
mu = 7.0
sigma = 1.0
min_tokens = 128
max_tokens = 131072
output_tokens = 500
[slo]
output_tokens_per_s = 40
[scheduler]
policy = "paper"
threshold_tokens = 1
[[clusters]]
name = "home"
kind = "pd"
accelerator = "h20"
gpus = 8
gpus_per_instance = 8
prefill = 0
decode = 1
nodes = [{{ url = "{decode_url}", kvd_url = "{decode_kvd}" }}]
[[clusters]]
name = "far"
kind = "prfaas"
accelerator = "h200"
gpus = 8
gpus_per_instance = 8
nodes = [{{ url = "{prefill_url}", kvd_url = "{prefill_kvd}" }}]
[[links]]
from = "far"
to = "home"
gbps = 100000
rtt_ms = 0.1
[[links]]
from = "home"
to = "far"
gbps = 100000
rtt_ms = 0.1
"""


class Served(NamedTuple):
    """One response through a gateway."""

    tokens: list[int]
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    prompt: list[int]
    new_tokens: int
    kept: Served  # by the deployment that keeps answers
    plain: Served  # by the other one

    @property
    def computed_prompt_tokens(self) -> int:
        return self.kept.prompt_tokens - self.kept.cached_tokens


class Deployment(NamedTuple):
    gateway_url: str
    prefill_url: str
    model: str


# Processes ----------------------------------------------------------------------------------------


@contextmanager
def deployment(model: Path, folder: Path, *, keep: bool) -> Iterator[Deployment]:
    """A prefill node, a decode node and a gateway, when the gateway uses both nodes."""
    with ExitStack() as stack:
        nodes = []
        for name in ("prefill", "decode"):
            child = Child(
                folder / f"{name}.log",
                *("node", "--model", str(model), "--device", "cpu"),
                *("--set", f"node.block_tokens={BLOCK_TOKENS}"),
                *("--set", f"node.keep_answers={'true' if keep else 'false'}"),
                *("--", *KVD_OPTIONS, "--node", name),
            )
            stack.callback(child.stop)
            nodes.append(child)
        prefill, decode = (
            Node(url, _card(url)["prfaas"]["kvd_url"])
            for url in [node.ready(NodeReady).http for node in nodes]
        )
        yield stack.enter_context(_gateway(folder, prefill, decode))


@contextmanager
def vllm_deployment(python: Path, model: Path, folder: Path, *, keep: bool) -> Iterator[Deployment]:
    with (
        vllm_nodes(python, model, folder, KVD_OPTIONS, keep=keep) as (prefill, decode),
        _gateway(folder, prefill, decode) as deployed,
    ):
        yield deployed


@contextmanager
def _gateway(folder: Path, prefill: Node, decode: Node) -> Iterator[Deployment]:
    file = folder / "deployment.toml"
    file.write_text(
        _DEPLOYMENT.format(
            decode_url=decode.url,
            decode_kvd=decode.kvd_url,
            prefill_url=prefill.url,
            prefill_kvd=prefill.kvd_url,
        )
    )
    gateway = Child(folder / "gateway.log", "gateway", str(file), "--port", "0")
    try:
        url = gateway.ready(GatewayReady).http
        _await_nodes(url)
        served = _get(f"{url}/v1/models")["data"][0]["id"]
        yield Deployment(url, prefill.url, served)
    finally:
        gateway.stop()


def _await_nodes(url: str) -> None:
    until_s = time.monotonic() + SETTLE_S
    while True:
        clusters = _get(f"{url}/prfaas/v1/state")["clusters"]
        nodes = [node for cluster in clusters for node in cluster["nodes"]]
        if sum(bool(node.get("in_use")) for node in nodes) == 2:
            return
        if time.monotonic() > until_s:
            raise InputError("the gateway does not use both nodes", where=url)
        time.sleep(POLL_S)


def _card(url: str) -> dict[str, Any]:
    card: dict[str, Any] = _get(f"{url}/v1/models")["data"][0]
    return card


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=REQUEST_S) as answer:
        return json.load(answer)


# Requests -----------------------------------------------------------------------------------------


def ask(url: str, model: str, prompt: Sequence[int], answer_tokens: int) -> Served:
    """One streamed completion. The clock stops at the first event with a token."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": answer_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    address = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(address.netloc, timeout=REQUEST_S)
    try:
        began_s = time.monotonic()
        connection.request(
            "POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read().decode(errors="replace")
            raise InputError(f"HTTP {answer.status}: {text}", where=url)
        tokens: list[int] = []
        ttft_s = 0.0
        usage: dict[str, Any] = {}
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line.removeprefix(b"data: "))
            for choice in event["choices"]:
                ttft_s = ttft_s or time.monotonic() - began_s
                tokens += choice.get("token_ids") or []
            usage = event.get("usage") or usage
    finally:
        connection.close()
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Served(tokens, ttft_s, usage["prompt_tokens"], cached)


def computed_alone(url: str, prompt: Sequence[int], answer_tokens: int) -> list[int]:
    """The answer of a node that uses no cache."""
    answer = post(
        f"{url}/v1/completions",
        {
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "kv_transfer_params": {"do_reference": True, "cut_tokens": []},
        },
    )
    tokens: list[int] = answer["choices"][0]["token_ids"]
    return tokens


def converse(
    kept: Deployment,
    plain: Deployment,
    turns: int,
    first: int,
    new: int,
    answer: int,
    pause_s: float,
) -> list[Turn]:
    source = random.Random(21)
    prompt = source.choices(_VOCABULARY, k=first)
    added = first
    found: list[Turn] = []
    for number in range(turns):
        order = (kept, plain) if number % 2 else (plain, kept)
        served = {one.gateway_url: ask(one.gateway_url, one.model, prompt, answer) for one in order}
        turn = Turn(prompt, added, served[kept.gateway_url], served[plain.gateway_url])
        found.append(turn)
        say(
            f"turn {number + 1}: {len(prompt)} tokens, {turn.computed_prompt_tokens} computed, "
            f"TTFT {turn.kept.ttft_s:.3f} s, without {turn.plain.ttft_s:.3f} s"
        )
        added = new
        prompt = [*prompt, *turn.kept.tokens, *source.choices(_VOCABULARY, k=new)]
        time.sleep(pause_s)  # what a user or a tool takes
    return found


def decode_cost(model: Path, answer_tokens: int, rounds: int = 4) -> float:
    """In this process, with one sequence: then a copy is the largest share of a step."""
    engine = HFEngine(load_model(model, device="cpu"), block_tokens=BLOCK_TOKENS)
    prompt = random.Random(1).choices(_VOCABULARY, k=2 * BLOCK_TOKENS)
    sampling = Sampling(max_tokens=answer_tokens, ignore_eos=True)
    best: dict[bool, float] = {}
    try:
        for number in range(2 * rounds + 1):
            keep = bool(number % 2)
            times_s: list[float] = []
            ended = threading.Event()

            def emit(event: Event, times_s: list[float] = times_s, ended: Any = ended) -> None:
                if isinstance(event, Token | Finished):
                    times_s.append(time.monotonic())
                if isinstance(event, Finished | JobFailed):
                    ended.set()

            kept = KeepAnswer(2 * BLOCK_TOKENS) if keep else None
            engine.submit(EngineJob(f"{number}", prompt, sampling, keep=kept), emit)
            if not ended.wait(REQUEST_S):
                raise InputError("the engine did not answer in time", where="decode_cost")
            if number:  # the first one warms up
                best[keep] = min(best.get(keep, math.inf), times_s[-1] - times_s[0])
    finally:
        engine.close()
    return best[True] / best[False] - 1


def summary(
    turns: Sequence[Turn], expected: Sequence[Sequence[int]], block_tokens: int = BLOCK_TOKENS
) -> dict[str, Any]:
    """`expected`: the answer to each turn's prompt without a cache."""
    ratios = [turn.plain.ttft_s / turn.kept.ttft_s for turn in turns[1:]]
    shown = []
    for number, (turn, alone) in enumerate(zip(turns, expected, strict=True), start=1):
        shown.append(
            {
                "turn": number,
                "prompt_tokens": len(turn.prompt),
                "new_tokens": turn.new_tokens,
                "computed_prompt_tokens": turn.computed_prompt_tokens,
                "computed_without": turn.plain.prompt_tokens - turn.plain.cached_tokens,
                "equal": turn.kept.tokens == turn.plain.tokens == list(alone),
                "ttft_s": round(turn.kept.ttft_s, 4),
                "ttft_without_s": round(turn.plain.ttft_s, 4),
            }
        )
    return {
        "block_tokens": block_tokens,
        "ttft_ratio": round(statistics.median(ratios), 2) if ratios else None,
        "turns": shown,
    }


def failures(result: dict[str, Any]) -> list[str]:
    """What is not as it should be, in sentences."""
    shown = result.get("turns", [])
    block = result.get("block_tokens", 0)
    found = [f"turn {turn['turn']}: the answers differ" for turn in shown if not turn["equal"]]
    found += (
        f"turn {turn['turn']}: {turn['computed_prompt_tokens']} prompt tokens were computed for "
        f"{turn['new_tokens']} new ones"
        for turn in shown[1:]
        if turn["computed_prompt_tokens"] > turn["new_tokens"] + block
    )
    return found


class Conversation(NamedTuple):
    turns: int
    first_tokens: int
    new_tokens: int
    answer_tokens: int
    pause_s: float

    @property
    def most_tokens(self) -> int:
        return self.first_tokens + self.turns * (self.new_tokens + self.answer_tokens)

    def run(self, kept: Deployment, plain: Deployment) -> list[Turn]:
        return converse(
            kept,
            plain,
            self.turns,
            self.first_tokens,
            self.new_tokens,
            self.answer_tokens,
            self.pause_s,
        )


def with_nodes(said: Conversation, arch: str, folder: Path) -> dict[str, Any]:
    model = make_checkpoint(folder / "model", arch).directory
    with ExitStack() as stack:
        kept, plain = (
            stack.enter_context(deployment(model, made(folder / name), keep=name == "kept"))
            for name in ("kept", "plain")
        )
        found = said.run(kept, plain)
        tokens = said.answer_tokens
        alone = [computed_alone(plain.prefill_url, turn.prompt, tokens) for turn in found]
        cost = decode_cost(model, tokens)
    head = {"model": arch, "engine": "node", "decode_cost": round(cost, 4)}
    return {**head, **summary(found, alone)}


def with_vllm(said: Conversation, python: Path, folder: Path) -> dict[str, Any]:
    if said.most_tokens > VLLM_MAX_TOKENS:
        raise InputError(
            f"the conversation has {said.most_tokens} tokens; vLLM servers are started for at most "
            f"{VLLM_MAX_TOKENS}",
            where="--turns",
            fix="use fewer turns or shorter ones",
        )
    model = make_checkpoint(folder / "vllm-model", VLLM_ARCH).directory
    with ExitStack() as stack:
        kept, plain = (
            stack.enter_context(
                vllm_deployment(python, model, made(folder / name), keep=name == "vllm-kept")
            )
            for name in ("vllm-kept", "vllm-plain")
        )
        found = said.run(kept, plain)
        tokens = said.answer_tokens
        alone = [computed_by_vllm(plain.prefill_url, turn.prompt, tokens) for turn in found]
    head = {"model": VLLM_ARCH, "engine": "vllm"}
    return {**head, **summary(found, alone, VLLM_BLOCK_TOKENS)}


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@click.command(help=__doc__)
@click.option("--turns", default=10, show_default=True, help="Turns of the conversation.")
@click.option("--first-tokens", default=1000, show_default=True, help="Tokens of the first prompt.")
@click.option("--new-tokens", default=100, show_default=True, help="Tokens that each turn adds.")
@click.option("--answer-tokens", default=500, show_default=True, help="Tokens of each answer.")
@click.option("--pause-s", default=0.5, show_default=True, help="Seconds between two turns.")
@click.option("--arch", default="kimi-linear", show_default=True, help="A hybrid architecture.")
@click.option(
    "--vllm-python",
    type=click.Path(exists=True, path_type=Path),
    help="Python interpreter with vLLM and prfaas, for vLLM pairs.  [default: none]",
)
@click.option("--only-vllm", is_flag=True, help="Leave the deployments of `prfaas node` out.")
@logs_option
def main(
    arch: str,
    vllm_python: Path | None,
    only_vllm: bool,
    logs: Path | None,
    **conversation: Any,
) -> None:
    said = Conversation(**conversation)
    if only_vllm and vllm_python is None:
        raise InputError("no interpreter with vLLM", where="--only-vllm", fix="add --vllm-python")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="prfaas-turns-") as name:
        folder = Path(name) if logs is None else made(logs)
        if not only_vllm:
            result = with_nodes(said, arch, folder)
        if vllm_python is not None:
            result["vllm"] = with_vllm(said, vllm_python, folder)
    click.echo(json.dumps(result, indent=1))
    wrong = [problem for one in (result, result.get("vllm")) if one for problem in failures(one)]
    for problem in wrong:
        say(problem)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
