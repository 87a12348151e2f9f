"""Hit rates of the hybrid prefix pool on a trace in Mooncake's format (no tensors).

\b
    python -m prfaas_lab bench cache --trace FILE --model NAME --capacity-gb N|inf
                                     [--checkpoints ...] --json
    python -m prfaas_lab bench cache --trace FILE --trace FILE --model NAME --sweep
    python -m prfaas_lab bench cache --trace FILE --trace FILE --model NAME --keep-answers

The first form prints one result. The second form replays each trace at infinite capacity and at
25%, 10% and 5% of the working set (the peak bytes at infinite capacity), and prints the table of
docs/hybrid-cache.md. The third form prints hit rates at about 10% with and without kept answers.
Capacities are in units of 10^9 bytes. The first form measures the speed of the pool, too, and has
one case; --workers and --cluster are for the other two.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click

from prfaas.cache.blocks import Eviction
from prfaas.cache.checkpoints import checkpoint_policy
from prfaas.cache.eviction import LRU, CostAware, PrefillSeconds
from prfaas.cache.groups import rules_for, unit_bytes
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.replay import ReplayResult, replay, with_answers
from prfaas.cache.storage.arena import choose_layout
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.catalog import Catalog
from prfaas.cli.workers_options import workers_options
from prfaas.config.trace import TRACE_BLOCK_TOKENS, TraceRow, read_trace
from prfaas.display.console import progress_bar, run_benchmark
from prfaas.errors import InputError
from prfaas.kvd.store import ANSWER_PARTS
from prfaas.kvspec import KVSpec
from prfaas.planner.instance_times import prefill_profile
from prfaas.studies.parallel.run_all import run_all
from prfaas.studies.parallel.workers import Workers

FRACTIONS = (0.25, 0.10, 0.05)
# A rate changes with every change of the capacity, so kept answers are judged by the mean of some.
ABOUT_A_TENTH = (0.098, 0.099, 0.10, 0.101, 0.102)
# Name -> (checkpoints, eviction). The first is the default of prfaas, the last is the baseline.
POLICIES = {
    "default": ("default", "cost"),
    "branch points, cost-aware": ("branch", "cost"),
    "branch points, LRU": ("branch", "lru"),
    "last boundary, LRU": ("last", "lru"),
}


def spec_for(model: str) -> KVSpec:
    return Catalog.builtin().model(model).spec()


def prefill_cost(model: str) -> PrefillSeconds:
    """The prefill seconds that a cached prefix saves, from the model's profile on 8 x H200.

    The tokens after a prefix still pay for attention to it. The constant part is omitted, because
    the eviction policy uses only ratios."""
    catalog = Catalog.builtin()
    record = catalog.profile(model, "h200", 8)
    if record is None:
        raise InputError(
            f"{model!r} has no prefill profile on 8 x h200", fix="use --evict lru, or add a profile"
        )
    return prefill_profile(catalog, record).marginal_s


def run_replay(
    rows: Sequence[TraceRow],
    model: str,
    capacity_bytes: float,
    checkpoints: str,
    evict: str,
    *,
    answers: bool = False,
) -> tuple[ReplayResult, float]:
    """Returns the result of the replay and its wall time in seconds. `answers`: the pool has pages
    for answers, as many as a kvd has at most."""
    spec = spec_for(model)
    layout = choose_layout(unit_bytes(spec, TRACE_BLOCK_TOKENS))
    eviction: Eviction = LRU()
    if evict == "cost":
        eviction = CostAware(rules_for(spec), layout, TRACE_BLOCK_TOKENS, prefill_cost(model))
    pool = HybridPrefixPool(
        spec,
        TRACE_BLOCK_TOKENS,
        PoolStorage(
            layout,
            None if math.isinf(capacity_bytes) else int(capacity_bytes // layout.page_bytes),
        ),
        eviction=eviction,
        checkpoints=checkpoint_policy(checkpoints, TRACE_BLOCK_TOKENS),
    )
    if answers and (pages := pool.occupancy().capacity_pages) is not None:
        pool.set_aside(pages // ANSWER_PARTS)
    start = time.perf_counter()
    result = replay(rows, pool)
    return result, time.perf_counter() - start


def result_json(result: ReplayResult, seconds: float) -> dict[str, object]:
    return {
        "token_hit_rate": round(result.token_hit_rate, 6),
        "ideal_hit_rate": round(result.ideal_hit_rate, 6),
        "reuse_lost_tokens": result.lost_tokens,
        "bytes_by_group": result.peak_bytes_by_group,
        "evictions": result.evicted_blocks,
        "ops_per_s": round(result.pool_calls / seconds),
    }


class ReplayCase(NamedTuple):
    trace: str
    policy: str  # of POLICIES
    capacity_bytes: float


class Rates(NamedTuple):
    hit_rate: float
    ideal_hit_rate: float
    peak_bytes: int


Traces = Mapping[str, Sequence[TraceRow]]


def replay_case(traces: Traces, model: str, case: ReplayCase) -> Rates:
    rows = traces[case.trace]
    result, _ = run_replay(rows, model, case.capacity_bytes, *POLICIES[case.policy])
    peak_bytes = sum(result.peak_bytes_by_group.values())
    return Rates(result.token_hit_rate, result.ideal_hit_rate, peak_bytes)


def sweep(
    files: Sequence[Path], model: str, workers: Workers
) -> dict[str, dict[str, dict[str, float]]]:
    """Trace -> policy -> capacity ("inf", "25%", ...) -> token hit rate. "ideal" has only "inf"."""
    traces = {file.name.split(".")[0]: list(read_trace(file)) for file in files}
    run = partial(replay_case, traces, model)
    unlimited = {
        f"{trace}, {name}": ReplayCase(trace, name, math.inf)
        for trace, name in itertools.product(traces, POLICIES)
    }
    first = next(iter(POLICIES))
    with progress_bar("unlimited replays", len(unlimited)) as show:
        at_most = run_all(run, unlimited, workers, progress=show)
    working_set = {trace: at_most[f"{trace}, {first}"].peak_bytes for trace in traces}
    limited = {
        f"{trace}, {name}, {part:.0%}": ReplayCase(trace, name, part * working_set[trace])
        for trace, part, name in itertools.product(traces, FRACTIONS, POLICIES)
    }
    with progress_bar("replays", len(limited)) as show:
        found = run_all(run, limited, workers, progress=show)
    table: dict[str, dict[str, dict[str, float]]] = {}
    for trace in traces:
        table[trace] = {
            name: {
                "inf": at_most[f"{trace}, {name}"].hit_rate,
                **{
                    f"{part:.0%}": found[f"{trace}, {name}, {part:.0%}"].hit_rate
                    for part in FRACTIONS
                },
            }
            for name in POLICIES
        }
        table[trace]["ideal"] = {"inf": at_most[f"{trace}, {first}"].ideal_hit_rate}
        table[trace]["working_set_gb"] = {"inf": working_set[trace] / 1e9}
    return table


class AnswersCase(NamedTuple):
    kept: str  # name of the traffic
    capacity_bytes: float


def compare_answers(
    trace: Path, model: str, checkpoints: str, evict: str, workers: Workers
) -> dict[str, object]:
    """Token hit rates at about a tenth of the working set. `not_kept`: without pages for answers;
    `kept`: with them, and with answers; `kept_in_vain`: no answer occurs in a later prompt."""
    rows = list(read_trace(trace))
    result, _ = run_replay(rows, model, math.inf, checkpoints, evict)
    working_set = sum(result.peak_bytes_by_group.values())
    traffic = {
        "not_kept": (rows, False),
        "kept": (with_answers(rows), True),
        "kept_in_vain": (with_answers(rows, continued=False), True),
    }
    cases = {
        f"{name}, {part:.1%}": AnswersCase(name, part * working_set)
        for name, part in itertools.product(traffic, ABOUT_A_TENTH)
    }
    run = partial(answers_case, traffic, model, checkpoints, evict)
    with progress_bar("replays", len(cases)) as show:
        found = run_all(run, cases, workers, progress=show)
    rates: dict[str, dict[str, float]] = {}
    kept: dict[str, int] = {}
    for name in traffic:
        of = {f"{part:.1%}": found[f"{name}, {part:.1%}"] for part in ABOUT_A_TENTH}
        rates[name] = {part: round(rate, 6) for part, (rate, _) in of.items()}
        rates[name]["mean"] = round(statistics.fmean(rates[name].values()), 6)
        kept[name] = list(of.values())[-1][1]
    return {"trace": trace.name.split(".")[0], "model": model, "rates": rates, "answers": kept}


def answers_case(
    traffic: Mapping[str, tuple[Sequence[TraceRow], bool]],
    model: str,
    checkpoints: str,
    evict: str,
    case: AnswersCase,
) -> tuple[float, int]:
    rows, answers = traffic[case.kept]
    result, _ = run_replay(rows, model, case.capacity_bytes, checkpoints, evict, answers=answers)
    return result.token_hit_rate, result.kept_answers


@click.command(help=__doc__)
@click.option(
    "--trace",
    "traces",
    required=True,
    multiple=True,
    type=click.Path(path_type=Path),
    help="Trace in Mooncake's format, .jsonl or .xz; repeatable.",
)
@click.option("--model", required=True, help="Name of a model in the catalog.")
@click.option(
    "--capacity-gb",
    default="inf",
    show_default=True,
    help="Capacity in units of 10^9 bytes, or inf.",
)
@click.option(
    "--checkpoints",
    default="default",
    show_default=True,
    help="Policy for checkpoints of linear layers.",
)
@click.option(
    "--evict",
    default="cost",
    show_default=True,
    type=click.Choice(["lru", "cost"]),
    help="Eviction policy.",
)
@click.option("--sweep", "is_sweep", is_flag=True, help="Replay at several capacities.")
@click.option(
    "--keep-answers",
    is_flag=True,
    help="Compare hit rates with and without kept answers, at about 10% of the working set.",
)
@workers_options
@click.option("--json", "as_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(
    traces: tuple[Path, ...],
    model: str,
    capacity_gb: str,
    checkpoints: str,
    evict: str,
    is_sweep: bool,
    keep_answers: bool,
    workers: Workers,
    as_json: bool,
) -> None:
    try:
        if is_sweep:
            print(json.dumps(sweep(traces, model, workers), indent=2))
            return
        for trace in traces:
            if keep_answers:
                found = compare_answers(trace, model, checkpoints, evict, workers)
                print(json.dumps(found), flush=True)
                continue
            rows = list(read_trace(trace))
            result, seconds = run_replay(
                rows, model, _capacity_bytes(capacity_gb), checkpoints, evict
            )
            print(json.dumps(result_json(result, seconds)))
    except InputError as error:
        raise click.ClickException(str(error)) from None


def _capacity_bytes(text: str) -> float:
    try:
        gigabytes = float(text)
    except ValueError:
        gigabytes = -1.0
    if not gigabytes > 0:
        raise InputError(
            f"{text!r} is not a capacity", where="--capacity-gb", fix="use a positive number or inf"
        )
    return gigabytes * 1e9


if __name__ == "__main__":
    run_benchmark(main)
