"""What the requests that decode on a node notice when the node also prefills short remainders.

\b
    python -m prfaas_lab bench remainders [--engine hf|emulated] [--rounds 4] [--slice-s 30]
                                          [--neighbours 2] [--margin-s 0.1]

A node that prefills and a node that decodes serve one cluster, and two gateways route to them: one
lets decode nodes serve alone where that costs least, the other does not. Some long answers stream
from the decode node all the time: the neighbours. Time is cut into slices, which repeat in
alternating order:

\b
  quiet         only the neighbours
  handed_off    a conversation through the gateway without remainders: a turn every few seconds
  remainders    the same through the other gateway: turns are prefilled where the last answer is
                kept, where the default rule finds that cheapest; `--margin-s 0` favours it

The `hf` engine computes a tiny hybrid model on the CPU; its profile is measured first, because the
gateway's limit counts predicted seconds. The `emulated` engine follows the case study's profile,
whatever else the machine does. Prints JSON:

\b
  inter_token_ratio  time between two tokens of the neighbours, remainders over handed_off:
                     median, P90 and mean of all gaps; `paired` is the median, over neighbouring
                     slices, of the ratio of their means. Target: at most 1.05
  over_quiet         the same, over the quiet slices
  inter_token_s      the times themselves
  served             turns by the route that the gateway counts
  ttft_s             of turns after the first: medians
"""

from __future__ import annotations

import http.client
import json
import random
import re
import statistics
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click

from _engine_rack import REQUEST_S, SETTLE_S, START_S, Child, say
from prfaas.config.deployment import AloneSection
from prfaas.contracts.readiness import GatewayReady, NodeReady
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.errors import InputError
from prfaas.launch.attached_process import attached_prefix

Kind = Literal["quiet", "handed_off", "remainders"]
ENGINES = ("hf", "emulated")
KINDS: tuple[Kind, ...] = ("quiet", "handed_off", "remainders")
ORDER: tuple[Kind, ...] = ("quiet", "handed_off", "remainders", "remainders", "handed_off", "quiet")
BLOCK_TOKENS = 64
TARGET = 1.05
NODES = 2
POLL_S = 0.1
SETTLE_TOKENS_S = 2.0  # at the start of a slice, while the slice before ends
KVD_OPTIONS = ("--memory", "512MiB", "--log-level", "warning")
LONG_ANSWER = 20_000  # of a neighbour
_VOCABULARY = range(32, 127)  # byte-level ids, which exist in the checkpoint's tokenizer
_DEPLOYMENT = """
catalog = {catalog}
[model]
{model}
[workload]
kind = "lognormal"
mu = 6.0
sigma = 1.0
min_tokens = 128
max_tokens = 4096
output_tokens = 64
[slo]
output_tokens_per_s = {tokens_per_s}
[gateway]
plans = {plans}
[scheduler.alone]
margin_s = {margin_s}
[[clusters]]
name = "home"
kind = "pd"
accelerator = "{accelerator}"
gpus = {gpus}
gpus_per_instance = {each}
prefill = 1
decode = 1
nodes = [
    {{ url = "{prefill_url}", kvd_url = "{prefill_kvd}" }},
    {{ url = "{decode_url}", kvd_url = "{decode_kvd}" }},
]
[[links]]
from = "home"
to = "home"
gbps = 1
"""


class Setup(NamedTuple):
    """What the two engines differ in."""

    fields: dict[str, Any]  # of the deployment file
    # Starts a node that prefills and one that decodes: URLs of the engines and of the kvds.
    nodes: Callable[[ExitStack, Path], tuple[list[str], list[str]]]


class Served(NamedTuple):
    tokens: list[int]
    ttft_s: float


# Processes ----------------------------------------------------------------------------------------


def hf_setup(folder: Path) -> Setup:
    """A tiny hybrid model, and its profile on this machine."""
    model = make_checkpoint(folder / "model", "kimi-linear").directory
    profile = folder / "profile.toml"
    options = ("--model", str(model), "--device", "cpu")
    say("measuring the model's profile")
    with ExitStack() as stack:
        (url, _), _ = _start_nodes(options, stack, folder)
        subprocess.run(
            [
                *(*attached_prefix(), "profile", "--url", url),
                *("--lengths", "128,256,1024", "--cached", "1024", "--batches", "1,4"),
                *("--rounds", "3", "--accelerator", "this-machine", "--out", str(profile)),
            ],
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=START_S,
        )
    return Setup(_on_this_machine(model, profile), partial(_start_nodes, options))


def _on_this_machine(model: Path, profile: Path) -> dict[str, Any]:
    named = f'name = "model"\nconfig = "{model}/config.json"'
    return {
        **{"catalog": f'["{profile}"]', "model": named, "tokens_per_s": 0.5},
        **{"accelerator": "this-machine", "gpus": NODES, "each": 1},
    }


def _start_nodes(
    options: Sequence[str], stack: ExitStack, folder: Path
) -> tuple[list[str], list[str]]:
    nodes = []
    for name in ("one", "two"):
        child = Child(
            folder / f"{name}.log",
            *("node", *options),
            *("--set", f"node.block_tokens={BLOCK_TOKENS}"),
            *("--", *KVD_OPTIONS, "--node", name),
        )
        stack.callback(child.stop)
        nodes.append(child)
    urls = [node.ready(NodeReady).http for node in nodes]
    return urls, [_get(f"{url}/v1/models")["data"][0]["prfaas"]["kvd_url"] for url in urls]


def emulated_setup(_: Path) -> Setup:
    options = (
        *("--engine", "emulated", "--model", "case-study-1t", "--accelerator", "h20"),
        *("--set", "node.emulated.byte_scale=1e-3"),
    )
    fields = {
        **{"catalog": "[]", "model": 'name = "case-study-1t"', "tokens_per_s": 40},
        **{"accelerator": "h20", "gpus": 8 * NODES, "each": 8},
    }
    return Setup(fields, partial(_start_nodes, options))


class Deployment(NamedTuple):
    decode_url: str
    gateways: dict[Kind, str]
    model: str


@contextmanager
def deployment(setup: Setup, folder: Path, margin_s: float) -> Iterator[Deployment]:
    with ExitStack() as stack:
        urls, kvds = setup.nodes(stack, folder)
        gateways: dict[Kind, str] = {}
        for kind, margin in (("remainders", margin_s), ("handed_off", 1_000_000)):
            file = folder / f"{kind}.toml"
            file.write_text(
                _DEPLOYMENT.format(
                    **setup.fields,
                    margin_s=margin,
                    plans="true" if kind == "remainders" else "false",
                    prefill_url=urls[0],
                    prefill_kvd=kvds[0],
                    decode_url=urls[1],
                    decode_kvd=kvds[1],
                )
            )
            gateway = Child(folder / f"{kind}.log", "gateway", str(file), "--port", "0")
            stack.callback(gateway.stop)
            url = gateway.ready(GatewayReady).http
            gateways[kind] = url  # type: ignore[index]
            roles = _await_nodes(url)
        decode = urls[kvds.index(next(k for k, role in roles.items() if role == "decode"))]
        model = _get(f"{gateways['remainders']}/v1/models")["data"][0]["id"]
        yield Deployment(decode, gateways, model)


def _await_nodes(url: str) -> dict[str, str]:
    """Returns the roles by the kvd's URL, once the gateway uses all nodes."""
    until_s = time.monotonic() + SETTLE_S
    while True:
        clusters = _get(f"{url}/prfaas/v1/state")["clusters"]
        nodes = [node for cluster in clusters for node in cluster["nodes"]]
        if sum(bool(node.get("in_use")) for node in nodes) == NODES:
            return {node["kvd_url"]: node["role"] for node in nodes}
        if time.monotonic() > until_s:
            raise InputError("the gateway does not use both nodes", where=url)
        time.sleep(POLL_S)


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=REQUEST_S) as answer:
        return json.load(answer)


def served_by_route(gateway_url: str) -> dict[str, int]:
    """Finished requests of a gateway."""
    with urllib.request.urlopen(f"{gateway_url}/metrics", timeout=REQUEST_S) as answer:
        page = answer.read().decode()
    found: dict[str, int] = {}
    for labels, value in re.findall(
        r"^prfaas_gateway_requests_total\{([^}]*)\} (\S+)", page, re.MULTILINE
    ):
        route = re.search(r'route="([^"]*)"', labels)
        assert route is not None
        found[route[1]] = found.get(route[1], 0) + int(float(value))
    return {route: number for route, number in found.items() if number}


# Requests -----------------------------------------------------------------------------------------


class Stream:
    """One streamed completion."""

    def __init__(self, url: str, prompt: Sequence[int], answer_tokens: int) -> None:
        body = {
            "prompt": list(prompt),
            "max_tokens": answer_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        address = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(address.netloc, timeout=REQUEST_S)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps(body), headers)
        self._answer = self._connection.getresponse()
        if self._answer.status != 200:
            text = self._answer.read().decode(errors="replace")
            raise InputError(f"HTTP {self._answer.status}: {text}", where=url)

    def tokens(self) -> Iterator[int]:
        for line in self._answer:
            if line.startswith(b"data: {"):
                event = json.loads(line.removeprefix(b"data: "))
                for choice in event["choices"]:
                    yield from choice.get("token_ids") or []

    def close(self) -> None:
        self._answer.close()
        self._connection.close()


class Neighbour:
    """Long answers that stream from the decode node, one after the other; the times of tokens."""

    def __init__(self, url: str, prompt: Sequence[int]) -> None:
        self.times_s: list[float] = []
        self._url, self._prompt = url, prompt
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while not self._stopping.is_set():
            stream = Stream(self._url, self._prompt, LONG_ANSWER)
            for _ in stream.tokens():
                self.times_s.append(time.monotonic())
                if self._stopping.is_set():
                    break
            stream.close()

    def gaps_s(self, start_s: float, stop_s: float) -> list[float]:
        times = [at_s for at_s in list(self.times_s) if start_s <= at_s <= stop_s]
        return [later - before for before, later in zip(times, times[1:], strict=False)]

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(REQUEST_S)


def ask(url: str, prompt: Sequence[int], answer_tokens: int) -> Served:
    began_s = time.monotonic()
    stream = Stream(url, prompt, answer_tokens)
    try:
        tokens: list[int] = []
        ttft_s = 0.0
        for token in stream.tokens():
            ttft_s = ttft_s or time.monotonic() - began_s
            tokens.append(token)
    finally:
        stream.close()
    return Served(tokens, ttft_s)


class Traffic(NamedTuple):
    first_tokens: int
    new_tokens: int
    answer_tokens: int
    every_s: float


def converse(url: str, traffic: Traffic, until_s: float, source: random.Random) -> list[float]:
    """Turns of one conversation at regular times. Returns the TTFTs of those after the first."""
    prompt = source.choices(_VOCABULARY, k=traffic.first_tokens)
    times_s: list[float] = []
    while True:
        began_s = time.monotonic()
        served = ask(url, prompt, traffic.answer_tokens)
        times_s.append(served.ttft_s)
        prompt += [*served.tokens, *source.choices(_VOCABULARY, k=traffic.new_tokens)]
        pause_s = began_s + traffic.every_s - time.monotonic()
        if time.monotonic() + max(0.0, pause_s) >= until_s:
            return times_s[1:]
        time.sleep(max(0.0, pause_s))  # what a user takes


class Slice(NamedTuple):
    kind: Kind
    gaps_s: list[float]
    ttft_s: list[float]


def run_slices(
    found: Deployment, kinds: Sequence[Kind], slice_s: float, neighbours: int, traffic: Traffic
) -> list[Slice]:
    source = random.Random(21)
    streams = [
        Neighbour(found.decode_url, source.choices(_VOCABULARY, k=BLOCK_TOKENS))
        for _ in range(neighbours)
    ]
    slices: list[Slice] = []
    try:
        for kind in kinds:
            time.sleep(SETTLE_TOKENS_S)
            start_s = time.monotonic()
            stop_s = start_s + slice_s
            ttft_s: list[float] = []
            if kind != "quiet":
                ttft_s = converse(found.gateways[kind], traffic, stop_s, source)
            time.sleep(max(0.0, stop_s - time.monotonic()))
            gaps_s = [gap_s for one in streams for gap_s in one.gaps_s(start_s, stop_s)]
            if not gaps_s:
                raise InputError("the neighbours got no tokens", where=kind)
            slices.append(Slice(kind, gaps_s, ttft_s))
            say(f"{kind}: {statistics.fmean(gaps_s) * 1e3:.1f} ms per token")
    finally:
        for stream in streams:
            stream.stop()
    return slices


def paired_ratios(slices: Sequence[Slice], over: Kind) -> list[float]:
    """The mean gap of each slice with remainders over that of the nearest slice of another kind.
    Other load of the machine, which changes slowly, is then in both."""
    means = [(one.kind, statistics.fmean(one.gaps_s)) for one in slices]
    found = []
    for place, (kind, mean_s) in enumerate(means):
        if kind == "remainders":
            others = [(abs(k - place), m) for k, (name, m) in enumerate(means) if name == over]
            found.append(mean_s / min(others)[1])
    return found


def summary(slices: Sequence[Slice]) -> dict[str, Any]:
    def spread(kind: Kind) -> dict[str, float]:
        gaps_s = sorted(gap_s for one in slices if one.kind == kind for gap_s in one.gaps_s)
        return {
            "median": statistics.median(gaps_s),
            "p90": gaps_s[int(0.9 * (len(gaps_s) - 1))],
            "mean": statistics.fmean(gaps_s),
        }

    spreads = {kind: spread(kind) for kind in KINDS}

    def ratios(over: Kind) -> dict[str, float]:
        found = {name: value / spreads[over][name] for name, value in spreads["remainders"].items()}
        found["paired"] = statistics.median(paired_ratios(slices, over))
        return {name: round(value, 4) for name, value in found.items()}

    ttft_s = {
        kind: [ttft for one in slices if one.kind == kind for ttft in one.ttft_s]
        for kind in KINDS[1:]
    }
    ratio = ratios("handed_off")
    return {
        "inter_token_ratio": ratio,
        "within_target": max(ratio["paired"], ratio["median"]) <= TARGET,
        "over_quiet": ratios("quiet"),
        "inter_token_s": {
            kind: {name: round(value, 5) for name, value in one.items()}
            for kind, one in spreads.items()
        },
        "ttft_s": {k: round(statistics.median(v), 4) if v else None for k, v in ttft_s.items()},
    }


@click.command(help=__doc__)
@click.option("--engine", default="hf", show_default=True, type=click.Choice(ENGINES))
@click.option("--rounds", default=4, show_default=True, type=click.IntRange(1))
@click.option("--slice-s", default=30.0, show_default=True, type=click.FloatRange(5.0))
@click.option("--every-s", default=3.0, show_default=True, type=click.FloatRange(0.1))
@click.option("--neighbours", default=2, show_default=True, type=click.IntRange(1, 8))
@click.option(
    "--margin-s",
    default=AloneSection().margin_s,
    show_default=True,
    type=click.FloatRange(0),
    help="`scheduler.alone.margin_s`.",
)
@click.option("--new-tokens", default=100, show_default=True, type=click.IntRange(1))
@click.option("--json", "_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(
    engine: str,
    rounds: int,
    slice_s: float,
    every_s: float,
    neighbours: int,
    margin_s: float,
    new_tokens: int,
    _json: bool,
) -> None:
    traffic = Traffic(512, new_tokens, BLOCK_TOKENS, every_s)
    kinds = [ORDER[i % len(ORDER)] for i in range(rounds * len(KINDS))]
    with tempfile.TemporaryDirectory(prefix="prfaas-remainders-") as name:
        folder = Path(name)
        setup = hf_setup(folder) if engine == "hf" else emulated_setup(folder)
        with deployment(setup, folder, margin_s) as found:
            slices = run_slices(found, kinds, slice_s, neighbours, traffic)
            served = {kind: served_by_route(url) for kind, url in found.gateways.items()}
    result = {"engine": engine, "neighbours": neighbours, **summary(slices), "served": served}
    click.echo(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
