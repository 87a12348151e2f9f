"""Open-loop load on any OpenAI endpoint: latencies and throughput at the client.

\b
    python -m prfaas_lab bench serve --url http://127.0.0.1:8080 --load 2 \\
        --lengths lognormal:9.9,1,128,131072
    python -m prfaas_lab bench serve --url URL --load 5 --lengths 0.8*fixed:512+0.2*fixed:30000 \\
        --output 64
    python -m prfaas_lab bench serve --url URL --load 2 --workload configs/case_study.toml
    python -m prfaas_lab bench serve --url URL --trace conversation.jsonl.xz --speedup 2 \\
        --requests 500

Prompts are token ids. The benchmark sends each request at its scheduled time and does not wait for
earlier answers. `late_s` in the result is the generator's lag, which should be small compared with
TTFT. Equal hash ids of a trace in Mooncake's format become equal tokens, so its prefixes are shared
as in the original traffic.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path

import click
import msgspec
import uvloop

from prfaas.clock import MonotonicClock
from prfaas.config import load_deployment
from prfaas.config.trace import read_trace
from prfaas.display.console import print_json, progress_bar, run_benchmark
from prfaas.errors import InputError
from prfaas.measure.client import TIMEOUT_S, connect
from prfaas.measure.lengths import parse_lengths
from prfaas.measure.open_loop import RequestResult, RequestTemplate, offer_load
from prfaas.measure.prompts import TEXT_IDS, PromptGenerator
from prfaas.measure.summary import summarise_load
from prfaas.sim.arrivals import Arrivals, poisson, replay
from prfaas.studies.problem_files import Study

DEFAULT_REQUESTS = 100
DEFAULT_OUTPUT_TOKENS = 128


@click.command(help=__doc__)
@click.option("--url", required=True, help="URL of the server, without /v1.")
@click.option("--load", type=float, help="Poisson arrivals: requests per second.")
@click.option("--lengths", help="Lengths of the prompts, see above.")
@click.option(
    "--workload",
    type=click.Path(path_type=Path),
    help="Deployment file whose prompt lengths to use.",
)
@click.option(
    "--trace", type=click.Path(path_type=Path), help="Trace in Mooncake's format, .jsonl or .xz."
)
@click.option(
    "--speedup",
    default=1.0,
    show_default=True,
    help="Factor by which the trace is replayed faster.",
)
@click.option(
    "--requests", type=int, help=f"Requests.  [default: {DEFAULT_REQUESTS}; all of a trace]"
)
@click.option(
    "--output", type=float, help=f"Tokens per answer.  [default: {DEFAULT_OUTPUT_TOKENS}]"
)
@click.option(
    "--output-scale", default=1.0, show_default=True, help="Factor on the tokens per answer."
)
@click.option("--model", help="Model name.  [default: the server's first model]")
@click.option("--api-key", "key", help="API key of the server.")
@click.option(
    "--vocabulary",
    default=TEXT_IDS.stop,
    show_default=True,
    help="Token ids are below this number.",
)
@click.option(
    "--fresh/--no-fresh", default=True, show_default=True, help="Use a new cache salt for this run."
)
@click.option("--seed", default=0, show_default=True, help="Seed of the arrivals.")
@click.option("--timeout-s", default=TIMEOUT_S, show_default=True, help="Timeout of one request.")
@click.option("--json", "as_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(
    url: str,
    load: float | None,
    lengths: str | None,
    workload: Path | None,
    trace: Path | None,
    speedup: float,
    requests: int | None,
    output: float | None,
    output_scale: float,
    model: str | None,
    key: str | None,
    vocabulary: int,
    fresh: bool,
    seed: int,
    timeout_s: float,
    as_json: bool,
) -> None:
    if (trace is None) == (load is None):
        raise InputError("exactly one of --trace and --load is required", fix="give either of them")
    if vocabulary <= TEXT_IDS.start:
        raise InputError(
            f"{vocabulary} is too small",
            where="--vocabulary",
            fix=f"give more than {TEXT_IDS.start}",
        )
    if trace is not None:
        arrivals = _replayed(trace, seed, speedup, requests)
    else:
        assert load is not None
        arrivals = _random(load, lengths, workload, output, requests or DEFAULT_REQUESTS, seed)

    async def run() -> list[RequestResult]:
        clock = MonotonicClock()
        async with connect(url, clock, key=key, model=model, timeout_s=timeout_s) as target:
            assert target.model is not None
            ask = RequestTemplate(target.model, secrets.token_hex(8) if fresh else "", output_scale)
            ids = range(TEXT_IDS.start, vocabulary)
            with progress_bar("answered", len(arrivals)) as show:
                return await offer_load(
                    target, arrivals, ask, PromptGenerator(ids), clock, seed=seed, done=show
                )

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        outcomes = runner.run(run())
    print_json({"url": url, **msgspec.to_builtins(summarise_load(outcomes))})


def _replayed(trace: Path, seed: int, speedup: float, requests: int | None) -> Arrivals:
    if not speedup > 0:
        raise InputError(f"{speedup:g} is out of range", where="--speedup", fix="give more than 0")
    rows = list(read_trace(trace))[:requests]
    try:
        return replay(rows, seed, speedup=speedup)
    except InputError as error:
        raise error.in_file(trace) from None


def _random(
    load: float,
    lengths: str | None,
    workload: Path | None,
    output: float | None,
    requests: int,
    seed: int,
) -> Arrivals:
    if not load > 0 or requests < 1:
        raise InputError("the load is empty", where="--load, --requests", fix="give more than 0")
    if (lengths is None) == (workload is None):
        raise InputError(
            "exactly one of --lengths and --workload is required", fix="give either of them"
        )
    if workload is not None:
        stated = Study(workload, "exact").problem(load_deployment(workload)).workload
    else:
        assert lengths is not None
        stated = parse_lengths(
            lengths, output_tokens=output or DEFAULT_OUTPUT_TOKENS, where="--lengths"
        )
    return poisson(stated, load, requests, seed)


if __name__ == "__main__":
    run_benchmark(main)
