"""What following requests costs the gateway: its CPU time per request.

\b
    python -m prfaas_lab bench tracing [--before FOLDER] [--rounds 10] [--seconds 3]

Three gateways stand in front of the same nodes, which answer at once (`bench/_null_node.py`):

\b
  before   the gateway of another checkout, such as a git worktree of the commit before; without
           --before it is left out
  off      this checkout, without a collector. It keeps requests all the same.
  on       this checkout, which sends the spans of every request to a collector on this machine that
           takes them and does nothing (`bench/_otlp_sink.py`)

Every round measures each of them once, in alternating order, with the same prompts. The CPU time is
that of the whole gateway process, with the thread that passes spans on, less what the gateway takes
without requests (it polls the nodes). The process that encodes and posts spans is counted by
itself. A ratio is the median of the rounds' ratios: what else runs on the machine changes from
round to round, and less within one. Prints JSON:

\b
  idle_cores  the part of a core that each gateway takes without requests
  targets     per gateway, medians: CPU time per request, that of its sender of spans, requests/s,
              TTFT, errors
  ratios      `off_to_before` and `on_to_off`, each the median and the quartiles of the rounds
  spans       bytes of OTLP per request of `on`
  verdict     whether `off_to_before` is at most 1.02 and `on_to_off` at most 1.10, without an
              error; otherwise the exit code is 1
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import click
import uvloop

from _processes import free_ports, process
from gateway import (
    DEPLOYMENT,
    HERE,
    MODEL,
    NODES,
    Target,
    load,
    ready,
    requests_of,
)

MOST_OFF = 1.02  # CPU without a collector; the rest is noise
MOST_ON = 1.10
IDLE_S = 5.0
# Every request is handed off, and none waits for a prefill of the predicted length: these nodes
# answer at once.
POLICY = """
[scheduler]
policy = "remote"
"""


@click.command(help=__doc__)
@click.option(
    "--before",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of another checkout, whose gateway is measured, too.",
)
@click.option("--seconds", default=3.0, show_default=True, help="Seconds of each measurement.")
@click.option("--rounds", default=10, show_default=True, help="Measurements of each gateway.")
@click.option("--length", default=1_000, show_default=True, help="Tokens per prompt.")
@click.option("--streams", default=16, show_default=True, help="Requests in flight.")
def main(before: Path | None, seconds: float, rounds: int, length: int, streams: int) -> None:
    requests = requests_of(length)
    with tempfile.TemporaryDirectory() as name, started(Path(name), before) as (targets, sink):
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in targets}
        for target in targets.values():  # imports and caches are warm afterwards
            _measure(target, requests, streams, 1.0, 0.0)
        idle = _idle_parts(targets)
        sent_bytes = _received(sink)
        for number in range(rounds):
            for name in list(targets) if number % 2 else list(reversed(targets)):
                found = _measure(targets[name], requests, streams, seconds, idle[name])
                runs[name].append(found)
            shown = {name: round(many[-1]["cpu_ms"], 3) for name, many in runs.items()}
            click.echo(json.dumps({"round": number, **shown}), err=True)
        answered = sum(run["answered"] for run in runs["on"])
        span_bytes = (_received(sink) - sent_bytes) / max(1, answered)
    ratios = {"on_to_off": _ratio(runs["on"], runs["off"])}
    if before is not None:
        ratios["off_to_before"] = _ratio(runs["off"], runs["before"])
    errors = sum(run["errors"] for many in runs.values() for run in many)
    passed = (
        ratios["on_to_off"]["median"] <= MOST_ON
        and (before is None or ratios["off_to_before"]["median"] <= MOST_OFF)
        and errors == 0
    )
    results = {
        "rounds": rounds,
        "seconds": seconds,
        "prompt_tokens": length,
        "streams": streams,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "idle_cores": {name: round(part, 4) for name, part in idle.items()},
        "targets": {name: _medians(many) for name, many in runs.items()},
        "ratios": ratios,
        "spans": {"bytes_per_request": round(span_bytes)},
        "verdict": passed,
    }
    print(json.dumps(results, indent=2))
    sys.exit(0 if passed else 1)


@contextmanager
def started(folder: Path, before: Path | None) -> Iterator[tuple[dict[str, Target], int]]:
    """The gateways by name, and the port of the collector."""
    *nodes, sink = free_ports(len(NODES) + 1)
    urls = {name: f"http://127.0.0.1:{at}" for name, at in zip(NODES, nodes, strict=True)}
    pairs = [word for name, at in zip(NODES, nodes, strict=True) for word in (str(at), name)]
    with ExitStack() as stack:

        def start(
            name: str, command: Sequence[str], port: int, request: bytes | None, source: Path
        ) -> int:
            log = folder / name
            with _environment({"PYTHONPATH": str(source / "src")}):
                child = stack.enter_context(process([sys.executable, *command], log))
            ready(port, child, log, request)
            return child.pid

        here = HERE.parent
        start("sink", [str(HERE / "_otlp_sink.py"), str(sink)], sink, None, here)
        start("nodes", [str(HERE / "_null_node.py"), *pairs], nodes[-1], None, here)
        options: dict[str, tuple[Path, Sequence[str]]] = {
            "off": (here, ()),
            "on": (here, ("--otlp-endpoint", f"http://127.0.0.1:{sink}")),
        }
        if before is not None:
            options = {"before": (before.resolve(), ()), **options}
        targets: dict[str, Target] = {}
        for (name, (source, more)), port in zip(
            options.items(), free_ports(len(options)), strict=True
        ):
            file = folder / f"{name}.toml"
            # One of them plans; the others would change the same nodes' roles.
            plans = "true" if not targets else "false"
            text = DEPLOYMENT.format(model=MODEL, port=port, plans=plans, **urls)
            file.write_text(text + POLICY)
            command = ["-m", "prfaas", "gateway", str(file), "--log-level", "error", *more]
            pid = start(name, command, port, requests_of(100)[0], source)
            targets[name] = Target([port], [pid])
        yield targets, sink


@contextmanager
def _environment(more: Mapping[str, str]) -> Iterator[None]:
    """Also without OpenTelemetry's own variables, which would switch the export on everywhere."""
    kept = dict(os.environ)
    os.environ.update(more)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _idle_parts(targets: Mapping[str, Target]) -> dict[str, float]:
    """The part of a core that each gateway takes without requests."""
    before = {name: target.cpu_s() for name, target in targets.items()}
    time.sleep(IDLE_S)
    return {name: (target.cpu_s() - before[name]) / IDLE_S for name, target in targets.items()}


def _measure(
    target: Target, requests: Sequence[bytes], streams: int, seconds: float, idle: float
) -> dict[str, Any]:
    sender = Target((), [pid for parent in target.pids for pid in _children(parent)])
    cpu_s, sender_s, begun_s = target.cpu_s(), sender.cpu_s(), time.perf_counter()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        run = runner.run(load(target.ports, requests, streams, seconds))
    answered = max(1, run["answered"])
    used_s = target.cpu_s() - cpu_s - idle * (time.perf_counter() - begun_s)
    run["cpu_ms"] = used_s * 1e3 / answered
    run["sender_cpu_ms"] = (sender.cpu_s() - sender_s) * 1e3 / answered
    return run


def _children(pid: int) -> list[int]:
    """The gateways of this benchmark have no other child than the sender of spans."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += map(int, (task / "children").read_text().split())
    return found


def _received(sink: int) -> int:
    with urllib.request.urlopen(f"http://127.0.0.1:{sink}/health", timeout=5) as answer:
        return int(answer.read())


def _ratio(
    runs: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    ratios = [
        float(run["cpu_ms"]) / float(other["cpu_ms"])
        for run, other in zip(runs, others, strict=True)
    ]
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return {
        "median": round(statistics.median(ratios), 3),
        "quartiles": [round(quartiles[0], 3), round(quartiles[2], 3)],
    }


def _medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    return {key: round(statistics.median(run[key] for run in runs), 3) for key in runs[0]}


if __name__ == "__main__":
    main()
