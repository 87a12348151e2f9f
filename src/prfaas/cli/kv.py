"""`prfaas kv`: shows KV size, prefill time, KV throughput of models (Tables 3, 5; eqs. 1, 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.table import Table

from prfaas.catalog import Catalog, ProfileRecord
from prfaas.catalog.hf_file import read_hf_config, read_hf_shape
from prfaas.catalog.shape import ModelShape
from prfaas.display.console import console, print_json
from prfaas.errors import InputError
from prfaas.estimator.instance import Instance
from prfaas.estimator.memory import require_fit
from prfaas.estimator.profile import estimated_profile
from prfaas.kvspec import KVSpec
from prfaas.planner.equations import eq1_kv_throughput_bps, eq2_min_egress_bps
from prfaas.planner.instance_times import prefill_profile
from prfaas.planner.profile import PrefillProfile
from prfaas.studies.problem_files import config_spec

DEFAULT_LENGTHS = (1_024, 8_192, 32_768, 131_072)
# Section 2.3 sizes clusters for an average uncached length of 32K. The report uses the nearest row.
EGRESS_LENGTH = 32_768


@dataclass(frozen=True, slots=True)
class Subject:
    """A model to report on."""

    name: str
    title: str
    spec: KVSpec
    provenance: str
    record: ProfileRecord | None
    profile: PrefillProfile | None
    no_times: str = "no prefill profile for this model, accelerator and instance size"


@click.command()
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    help="Hugging Face config.json of a model that the catalog does not have.",
)
@click.option("--lengths", help="Prompt lengths in tokens, comma-separated: 1024,32000.")
@click.option(
    "--gpus", default=512, show_default=True, help="Number of GPUs of the prefill cluster (N)."
)
@click.option(
    "--gpus-per-instance", default=8, show_default=True, help="GPUs of one prefill instance (P)."
)
@click.option(
    "--accelerator",
    default="h200",
    show_default=True,
    help="Accelerator whose prefill profiles are used.",
)
@click.option("--kv-dtype", help="Data type of the cached attention state.  [default: the model's]")
@click.option(
    "--catalog",
    type=click.Path(path_type=Path),
    help="TOML file with further models and profiles.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with the source of every value.")
def kv(
    models: tuple[str, ...],
    config: Path | None,
    lengths: str | None,
    gpus: int,
    gpus_per_instance: int,
    accelerator: str,
    kv_dtype: str | None,
    catalog: Path | None,
    as_json: bool,
) -> None:
    """Show how much KV cache a prefill produces, how fast, and the egress that a cluster needs.

    Without a MODEL the command lists every model of the catalog that has a profile on these
    instances. With --config it shows the model of a config.json: its bytes follow from its
    architecture. The times of a named MODEL without a profile, and of a config.json, are estimated.

    \b
      prfaas kv
      prfaas kv kimi-linear-48b-a3b --lengths 4096,65536
      prfaas kv --config ./my-model/config.json
      prfaas kv ring-2.5-1t --gpus 10000 --lengths 131072
    """
    for flag, value in (("--gpus", gpus), ("--gpus-per-instance", gpus_per_instance)):
        if value < 1:
            raise InputError(f"{value} is out of range", where=flag, fix="give 1 or more")
    if gpus < gpus_per_instance:
        raise InputError(
            f"{gpus} GPUs are fewer than the {gpus_per_instance} of one instance", where="--gpus"
        )
    known = Catalog.builtin().extended([catalog] if catalog else [])
    known.accelerator(accelerator)
    wanted = parse_lengths(lengths) if lengths else None
    longest = max(wanted or DEFAULT_LENGTHS)
    instance = (accelerator, gpus_per_instance)
    subjects = _subjects(known, models, config, instance, kv_dtype, longest)
    reports = [report(subject, wanted, gpus, gpus_per_instance) for subject in subjects]
    if as_json:
        print_json({"gpus": gpus, "gpus_per_instance": gpus_per_instance, "models": reports})
    else:
        _show(reports, gpus, gpus_per_instance, accelerator)


def parse_lengths(text: str) -> list[int]:
    lengths = []
    for part in text.split(","):
        try:
            tokens = int(part)
        except ValueError:
            raise InputError(
                f"{part!r} is not a token count",
                where="--lengths",
                fix="use plain numbers, because 32K may mean 32000 or 32768",
            ) from None
        if not 1 <= tokens <= 1_000_000_000:
            raise InputError(
                f"{tokens} tokens are out of range",
                where="--lengths",
                fix="give 1 to 1,000,000,000 tokens",
            )
        lengths.append(tokens)
    return lengths


def report(
    subject: Subject, lengths: list[int] | None, gpus: int, gpus_per_instance: int
) -> dict[str, Any]:
    record, profile = subject.record, subject.profile
    if lengths is None and record is not None and record.status != "estimated":
        lengths = sorted({point.new for point in record.prefill})
    rows = []
    for tokens in lengths or DEFAULT_LENGTHS:
        row: dict[str, Any] = {
            "tokens": tokens,
            "kv_bytes": subject.spec.kv_bytes(tokens),
            "t_prefill_s": None,
            "phi_kv_gbps": None,
            "egress_gbps": None,
            "source": subject.no_times,
        }
        if record is not None and profile is not None:
            seconds = float(profile.seconds(tokens))
            phi_bps = float(eq1_kv_throughput_bps(row["kv_bytes"], seconds))
            row["t_prefill_s"] = seconds
            row["phi_kv_gbps"] = phi_bps / 1e9
            row["egress_gbps"] = float(eq2_min_egress_bps(gpus, gpus_per_instance, phi_bps)) / 1e9
            row["source"] = f"T_prefill {_standing(record, tokens, profile.measured_range)}"
        rows.append(row)
    sizing = min(rows, key=lambda row: abs(math.log(row["tokens"] / EGRESS_LENGTH)))
    return {
        "name": subject.name,
        "title": subject.title,
        "kv_source": subject.provenance,
        "bytes_per_token": subject.spec.bytes_per_token,
        "state_bytes": subject.spec.state_bytes,
        "lengths": rows,
        "egress_gbps": sizing["egress_gbps"],
        "egress_at_tokens": sizing["tokens"],
    }


def _standing(record: ProfileRecord, tokens: int, measured: tuple[int, int]) -> str:
    if record.status == "estimated" or tokens in (point.new for point in record.prefill):
        return record.provenance
    if measured[0] <= tokens <= measured[1]:
        return f"inferred: interpolated between points that are {record.provenance}"
    return (
        f"inferred: extrapolated beyond {measured[0]:,} to {measured[1]:,} tokens, "
        f"from points that are {record.provenance}"
    )


def _subjects(
    catalog: Catalog,
    names: tuple[str, ...],
    config: Path | None,
    instance: tuple[str, int],
    kv_dtype: str | None,
    longest: int,
) -> list[Subject]:
    accelerator, gpus = instance
    if not names and config is None:
        names = tuple(n for n in catalog.models if catalog.profile(n, accelerator, gpus))
        if not names:
            have = sorted({f"{r.gpus} x {r.accelerator}" for r in catalog.profiles})
            raise InputError(
                f"no model has a profile on {gpus} x {accelerator}",
                where="--accelerator, --gpus-per-instance",
                fix=f"name a MODEL to see its bytes, or choose one of: {', '.join(have)}",
            )
    subjects = []
    for name in names:
        model = catalog.model(name)
        record = catalog.profile(name, accelerator, gpus)
        provenance = f"{model.status}: {model.source}"
        spec = model.spec(kv_dtype)
        subject = Subject(name, model.display_name, spec, provenance, record, None)
        if record is None:
            subjects.append(_estimated(subject, catalog, model.model_shape, instance, longest))
        else:
            subjects.append(replace(subject, profile=prefill_profile(catalog, record)))
    if config is not None:
        geometry = read_hf_config(config)
        spec = config_spec(geometry, kv_dtype)
        title = f"{geometry.model_type} ({config})"
        subject = Subject(str(config), title, spec, f"published: {config}", None, None)
        shape = partial(read_hf_shape, config)
        subjects.append(_estimated(subject, catalog, shape, instance, longest))
    return subjects


def _estimated(
    subject: Subject,
    catalog: Catalog,
    shape: Callable[[], ModelShape],
    on: tuple[str, int],
    longest: int,
) -> Subject:
    """The subject with estimated times, or with the reason why it has none."""
    accelerator, gpus = on
    try:
        instance = Instance(shape(), subject.spec, catalog.accelerator(accelerator), gpus)
        require_fit(instance, longest)
        record = estimated_profile(instance, longest)
    except InputError as error:
        reason = f"{subject.no_times}, and it cannot be estimated: {error.problem}"
        return replace(subject, no_times=reason)
    return replace(subject, record=record, profile=prefill_profile(catalog, record))


def _show(
    reports: list[dict[str, Any]], gpus: int, gpus_per_instance: int, accelerator: str
) -> None:
    table = Table(
        title=f"KV produced by one prefill instance of {gpus_per_instance} x {accelerator}",
        title_justify="left",
    )
    table.add_column("model")
    table.add_column("tokens", justify="right")
    table.add_column("S_kv MiB", justify="right")
    table.add_column("T_prefill s", justify="right")
    table.add_column("Phi_kv Gbps", justify="right")
    table.add_column(f"egress of {gpus:,} GPUs", justify="right")
    table.add_column("T_prefill is")
    for entry in reports:
        for index, row in enumerate(entry["lengths"]):
            timed = row["t_prefill_s"] is not None
            table.add_row(
                entry["title"] if index == 0 else "",
                f"{row['tokens']:,}",
                f"{row['kv_bytes'] / 2**20:,.1f}",
                f"{row['t_prefill_s']:.3f}" if timed else "-",
                f"{row['phi_kv_gbps']:.2f}" if timed else "-",
                _rate(row["egress_gbps"]) if timed else "-",
                row["source"].removeprefix("T_prefill ").split(":")[0] if timed else "unknown",
                end_section=index == len(entry["lengths"]) - 1,
            )
    out = console()
    out.print(table)
    out.print(
        "S_kv follows from each model's architecture; Phi_kv = S_kv / T_prefill (eq. 1); "
        "egress = N / P x Phi_kv (eq. 2).\n--json also prints the source of every value."
    )


def _rate(gbps: float) -> str:
    return f"{gbps / 1000:,.2f} Tbps" if gbps >= 1000 else f"{gbps:,.1f} Gbps"
