"""`prfaas profile`: measures a running server, or estimates a profile.

The planner and the emulated engine read the profile that it writes.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import uvloop
from rich.table import Table

from prfaas.catalog import Accelerator, Catalog, ProfileRecord
from prfaas.catalog.write import profile_toml
from prfaas.clock import MonotonicClock
from prfaas.display.console import console, print_json, progress_bar
from prfaas.errors import InputError
from prfaas.measure.client import connect
from prfaas.measure.http_profile import HttpProfiler
from prfaas.measure.measured_profile import MeasuredProfile
from prfaas.measure.prompts import PromptGenerator
from prfaas.planner.equations import eq1_kv_throughput_bps
from prfaas.studies.profile_estimate import MemoryLeft, estimate_profile

DEFAULT_LENGTHS = "256,1024,4096"
DEFAULT_BATCHES = "1,4,16"
DEFAULT_ROUNDS = 5


@click.command()
@click.option("--url", help="URL of a running OpenAI server to measure, without /v1.")
@click.option(
    "--estimate",
    "estimated",
    metavar="MODEL",
    help="Model of the catalog, or a config.json, whose profile to estimate instead, on --gpus of "
    "--accelerator.",
)
@click.option("--api-key", "key", help="API key for the server at --url.")
@click.option(
    "--lengths",
    default=DEFAULT_LENGTHS,
    show_default=True,
    help="Numbers of new prompt tokens to measure, comma-separated.",
)
@click.option(
    "--cached",
    default="",
    help="Lengths of cached prefixes, comma-separated; each is measured with every length.",
)
@click.option(
    "--batches",
    default=DEFAULT_BATCHES,
    show_default=True,
    help="Numbers of sequences to decode together, comma-separated.",
)
@click.option(
    "--rounds",
    default=DEFAULT_ROUNDS,
    show_default=True,
    help="Measurements of each point; the profile holds their median.",
)
@click.option("--accelerator", help="Name of the accelerator in the profile; required.")
@click.option(
    "--gpus", default=1, show_default=True, help="GPUs of one instance, noted in the profile."
)
@click.option(
    "--out", type=click.Path(path_type=Path), help="Catalog file (TOML) to write the profile to."
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def profile(
    url: str | None,
    estimated: str | None,
    key: str | None,
    lengths: str,
    cached: str,
    batches: str,
    rounds: int,
    accelerator: str | None,
    gpus: int,
    out: Path | None,
    as_json: bool,
) -> None:
    """Measure prefill times T_prefill(new, cached) and decode steps of a model.

    With --url the command measures any OpenAI server over HTTP, such as `prfaas node` or vLLM, and
    subtracts the round trip. With --estimate it measures nothing: it shows what `prfaas plan`
    assumes for hardware that you do not have.

    The server should be idle. First runs are not counted. Where noise makes a longer prompt look
    faster than a shorter one, both get their mean, and the profile's source notes it. To use the
    profile in `prfaas plan`, name its file under `catalog = [...]` in the deployment file. Two or
    more lengths make a profile; a single one still recalibrates what `prfaas plan` estimates.

    \b
    A model on this machine, which another terminal serves:
      prfaas node --model ./tiny-kimi --port 8000
      prfaas profile --url http://localhost:8000 --accelerator this-machine --out tiny.toml
    Other servers, and hardware that you do not have:
      prfaas profile --url http://h20:8000 --accelerator h20 --gpus 8 --lengths 1024,8192,32768
      prfaas profile --url http://h20:8000 --accelerator h20 --gpus 8 --cached 4096 --batches 1,8
      prfaas profile --estimate deepseek-v3 --accelerator h20 --gpus 16 --lengths 1024,8192,32768
    """
    wanted = Wanted(
        _numbers(lengths, "--lengths"),
        _numbers(cached, "--cached") if cached else [],
        _numbers(batches, "--batches") if batches else [],
        rounds,
        gpus,
    )
    if (url is None) == (estimated is None):
        raise InputError(
            "exactly one of --url and --estimate is required", fix="give one of the two"
        )
    if not 1 <= rounds <= 1000:
        raise InputError(
            f"{rounds} is out of range", where="--rounds", fix="give a number from 1 to 1000"
        )
    if out is not None and not out.parent.is_dir():
        raise InputError("no such directory", file=out.parent, fix="create it first")
    left: MemoryLeft | None = None
    if estimated is not None:
        if accelerator is None:
            raise InputError(
                "required with --estimate", where="--accelerator", fix="name one of the catalog"
            )
        model_on = (estimated, accelerator, wanted.gpus)
        found = estimate_profile(*model_on, wanted.lengths, wanted.cached, wanted.batches)
        record, measured, left = found
    else:
        assert url is not None
        record, measured = _of_server(url, key, wanted, accelerator)
    if out is not None:
        known = record.accelerator in Catalog.builtin().accelerators
        unknown = None if known else Accelerator(record.accelerator)
        out.write_text(profile_toml(record, unknown), encoding="utf-8")
    if as_json:
        memory = {} if left is None else {"memory": asdict(left)}
        print_json(_as_dict(record, measured) | memory)
    else:
        _show(record, measured, left, out)


@dataclass(frozen=True, slots=True)
class Wanted:
    lengths: Sequence[int]
    cached: Sequence[int]
    batches: Sequence[int]
    rounds: int
    gpus: int


def _of_server(
    url: str, key: str | None, wanted: Wanted, accelerator: str | None
) -> tuple[ProfileRecord, MeasuredProfile]:
    if accelerator is None:
        raise InputError(
            "required with --url, because a server does not report its hardware",
            where="--accelerator",
            fix="name the server's accelerator",
        )

    async def run() -> tuple[str, MeasuredProfile, float]:
        async with connect(url, MonotonicClock(), key=key) as target:
            assert target.model is not None
            profiler = HttpProfiler(
                target,
                PromptGenerator(),
                lengths=wanted.lengths,
                cached=wanted.cached,
                batches=wanted.batches,
                rounds=wanted.rounds,
            )
            with progress_bar("measuring", len(profiler)) as show:
                measured = await profiler.measured(show)
            return target.model, measured, await profiler.round_trip_s()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        model, measured, round_trip_s = runner.run(run())
    today = datetime.date.today().isoformat()
    record = measured.record(
        model=model,
        accelerator=accelerator,
        gpus=wanted.gpus,
        engine="an OpenAI server",
        by=f"prfaas profile over HTTP, {today}, {url}, "
        f"a round trip of {round_trip_s * 1e3:.2g} ms subtracted",
    )
    return record, measured


def _numbers(text: str, where: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(
            f"{text!r} is not a list of numbers",
            where=where,
            fix="give plain numbers, comma-separated: 1024,8192",
        ) from None


def _as_dict(record: ProfileRecord, measured: MeasuredProfile) -> dict[str, Any]:
    return {
        "model": record.model,
        "accelerator": record.accelerator,
        "gpus": record.gpus,
        "engine": record.engine,
        "status": record.status,
        "source": record.source,
        "prefill": [
            {
                "new": point.new_tokens,
                "cached": point.cached_tokens,
                "t_prefill_s": point.seconds,
                **_throughput(measured, point.new_tokens, point.cached_tokens, point.seconds),
            }
            for point in measured.prefill
        ],
        "decode": [{"batch": step.batch, "step_s": step.step_s} for step in measured.decode],
        "decode_context_tokens": measured.context_tokens,
        "levelled": measured.levelled,
    }


def _throughput(measured: MeasuredProfile, new: int, cached: int, seconds: float) -> dict[str, Any]:
    """S_kv and Phi_kv (eq. 1). Both are None for a prompt with a cached prefix."""
    if cached or new not in measured.kv_bytes:
        return {"kv_bytes": None, "phi_kv_gbps": None}
    kv_bytes = measured.kv_bytes[new]
    phi_bps = float(eq1_kv_throughput_bps(kv_bytes, seconds))
    return {"kv_bytes": kv_bytes, "phi_kv_gbps": phi_bps / 1e9}


def _show(
    record: ProfileRecord, measured: MeasuredProfile, left: MemoryLeft | None, out: Path | None
) -> None:
    screen = console()
    table = Table(title=f"{record.model} on {record.accelerator}", title_justify="left")
    for column in ("new tokens", "cached", "T_prefill (ms)", "S_kv (MiB)", "Phi_kv (Gbps)"):
        table.add_column(column, justify="right")
    for point in measured.prefill:
        found = _throughput(measured, point.new_tokens, point.cached_tokens, point.seconds)
        whole = found["kv_bytes"] is not None
        table.add_row(
            f"{point.new_tokens:,}",
            f"{point.cached_tokens:,}",
            f"{point.seconds * 1e3:,.2f}",
            f"{found['kv_bytes'] / 2**20:,.3f}" if whole else "-",
            f"{found['phi_kv_gbps']:,.4f}" if whole else "-",
        )
    screen.print(table)
    if measured.decode:
        steps = Table(
            title=f"decode after a prompt of {measured.context_tokens:,} tokens",
            title_justify="left",
        )
        for column in ("batch", "step (ms)", "tokens/s"):
            steps.add_column(column, justify="right")
        for step in measured.decode:
            rate = step.batch / step.step_s
            steps.add_row(str(step.batch), f"{step.step_s * 1e3:,.2f}", f"{rate:,.0f}")
        screen.print(steps)
    if left is not None:
        screen.print(
            f"Weights take {left.weight_bytes / 1e9:,.0f} GB and leave {left.kv_bytes / 1e9:,.0f} "
            f"GB for KV: {left.sequences:,} sequences of {left.context_tokens:,} tokens."
        )
    screen.print(record.provenance)
    if out is not None:
        screen.print(f"wrote {out}")
