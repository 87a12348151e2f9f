"""Plans and simulates the example deployments, and writes the results into docs/examples.md.

\b
    python -m prfaas_lab bench examples [--docs DIR]

The blocks between `<!-- begin NAME -->` and `<!-- end NAME -->` are replaced with the output of the
commands that the page shows; figures go to img/. Prints the figures of the page's table as JSON.
With --cluster, every machine of the cluster needs this checkout at the same path.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from prfaas.catalog import Catalog
from prfaas.cli.workers_options import workers_options
from prfaas.config import parse_deployment
from prfaas.display.console import progress_bar, run_benchmark
from prfaas.studies.gain_map import FINE_LINKS_GBPS, PAYS, gain_map
from prfaas.studies.parallel.run_all import run_all
from prfaas.studies.parallel.workers import Workers
from prfaas.studies.problem_files import Study

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
REQUESTS = 4000  # per simulated system: P90 and P99 of the TTFT are steady
TIMEOUT_S = 300
Report = dict[str, Any]


class Example(NamedTuple):
    config: str  # file in configs/, without .toml
    title: str
    baselines: tuple[str, ...]  # that the simulation compares with

    @property
    def plan(self) -> list[str]:
        return ["plan", f"configs/{self.config}.toml", "--map"]

    @property
    def simulate(self) -> list[str]:
        compared = [part for name in self.baselines for part in ("--baseline", name)]
        policies = ["--policy", "paper", "--policy", "adaptive"]
        return [
            *("simulate", f"configs/{self.config}.toml", *policies, *compared),
            *("--requests", str(REQUESTS)),
        ]


EXAMPLES = (
    Example("qwen3.5_h200_h20", "Qwen3.5-397B, H200 and H20", ("homogeneous", "equal_cost")),
    Example("kimi_linear_b200_rtxpro", "Kimi Linear, RTX PRO 6000 and B200", ("equal_cost",)),
    Example("mimo_mi300x_h200", "MiMo-V2-Flash, MI300X and H200", ("homogeneous", "equal_cost")),
)


def run(arguments: Sequence[str]) -> str:
    """The output of `prfaas`, as a reader without a terminal gets it."""
    done = subprocess.run(
        [sys.executable, "-m", "prfaas", *arguments],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
    )
    return done.stdout


def fill(text: str, sections: dict[str, Sequence[str]]) -> str:
    """Replaces what is between `<!-- begin NAME -->` and `<!-- end NAME -->`."""
    for name, lines in sections.items():
        pattern = re.compile(
            rf"(<!-- begin {re.escape(name)} -->\n).*?(<!-- end {re.escape(name)} -->)", re.DOTALL
        )
        if not pattern.search(text):
            raise click.ClickException(f"no place for {name!r} in the page")
        body = "\n".join(lines) + "\n"
        text = pattern.sub(lambda found, body=body: found[1] + body + found[2], text)  # type: ignore[misc]
    return text


def shown(output: str) -> list[str]:
    """Output as a block of the page, without the line that says how long a simulation took."""
    lines = [line.rstrip() for line in output.splitlines()]
    return ["```text", *(line for line in lines if "requests simulated" not in line), "```"]


def command(arguments: Sequence[str]) -> list[str]:
    return ["```sh", " ".join(["prfaas", *arguments]), "```"]


# --------------------------------------------------------------------------------------------------
# Sentences, from the figures of a plan


def gain(report: Report, name: str) -> str:
    ratio = report["ratios"][f"prfaas_over_{name}"]
    if ratio is None:
        return "no price"
    span = (report.get("ranges") or {}).get(f"prfaas_over_{name}")
    return f"{ratio:.2f}" if span is None else f"{ratio:.2f} ({span['low']:.2f}-{span['high']:.2f})"


def answer(report: Report, name: str, than: str) -> str:
    """Whether it pays, as far as the range of the gain allows an answer."""
    ratio = report["ratios"][f"prfaas_over_{name}"]
    if ratio is None:
        return f"Compared with {than}: not known, because a price is missing."
    span = (report.get("ranges") or {}).get(f"prfaas_over_{name}") or {"low": ratio, "high": ratio}
    text = f"Compared with {than}, it serves {gain(report, name)} times the requests: "
    if round(span["low"], 2) > 1:
        return text + "it pays, also at the lower end of the range."
    if round(span["high"], 2) < 1:
        return text + "it does not pay, even at the upper end of the range."
    if abs(ratio - 1) < PAYS - 1:
        return text + "it is about even, and the range includes 1."
    likely = "pays" if ratio > 1 else "does not pay"
    return text + f"it probably {likely}, but the range includes 1."


def binding(report: Report) -> str:
    plan, own = report["prfaas_pd"], report["map"]["own"]
    return (
        f"{plan['bottleneck']} limits the deployment. {plan['offload_fraction']:.0%} of the "
        f"requests, those above {plan['threshold_tokens']:,} uncached tokens, are prefilled "
        f"remotely and send {plan['egress_gbps']:.1f} Gbit/s over a link of {own['gbps']:g}."
    )


def beginning(report: Report) -> str:
    """From which bandwidth on it pays, compared with either baseline that there is."""
    begins, parts = report["pays_from_gbps"], []
    for name, than in (("homogeneous", "as many GPUs"), ("equal_cost", "the same money")):
        if report["ratios"][f"prfaas_over_{name}"] is not None:
            gbps = begins[name]
            at = "at no bandwidth" if gbps is None else f"from {gbps:.2g} Gbit/s on"
            parts.append(f"{at} compared with {than} in one cluster")
    return f"With this traffic, PrfaaS pays {', and '.join(parts)}."


def first_measurement(report: Report) -> str:
    narrow = report.get("narrow_with")
    if narrow is None:
        return "Nothing of the plan is estimated."
    before, after = narrow["before"], narrow["after"]
    figure = "gain" if narrow["figure"] == "gain" else "Lambda_max"
    return (
        f"Measure {narrow['gpus_per_instance']} x {narrow['accelerator']} first: the range of the "
        f"{figure} shrinks from {before['low']:.2f}-{before['high']:.2f} to about "
        f"{after['low']:.2f}-{after['high']:.2f}."
    )


def remote_only_rps(config: Path) -> float | None:
    """Requests/s of a PD cluster of the PrfaaS cluster's GPUs alone, for the same money. None if a
    price is unknown or its GPUs cannot serve the model."""
    raw = tomllib.loads(config.read_text(encoding="utf-8"))
    catalog, spend = Catalog.builtin(), 0.0
    for cluster in raw["clusters"]:
        price = catalog.accelerator(cluster["accelerator"]).usd_per_hour
        if price is None:
            return None
        spend += price.value * cluster["gpus"]
    (remote,) = (c for c in raw["clusters"] if c["kind"] == "prfaas")
    price = catalog.accelerator(remote["accelerator"]).usd_per_hour
    assert price is not None, "checked above"
    per = remote["gpus_per_instance"]
    gpus = int(spend / price.value) // per * per
    raw["clusters"] = [{**remote, "name": "pd", "kind": "pd", "gpus": gpus}]
    raw["links"] = [link for link in raw["links"] if link["from"] == link["to"] == "pd"]
    study = Study(config, "paper")
    return study.plan(parse_deployment(raw, config)).prfaas_pd.lambda_max_rps


def own_pays_from(config: Path, mean_tokens: int) -> dict[str, float | None]:
    """The link bandwidth from which the deployment pays with its own traffic, by baseline."""
    study = Study(config, "paper")
    deployment = parse_deployment(tomllib.loads(config.read_text(encoding="utf-8")), config)
    gains = gain_map(
        study.problem(deployment),
        lambda workload: study.problem(deployment, workload),
        "paper",
        FINE_LINKS_GBPS,
        [mean_tokens],
    )
    (row,) = gains.rows
    return {
        "homogeneous": row.pays_over_homogeneous.gbps,
        "equal_cost": row.pays_over_equal_cost.gbps,
    }


def summary(reports: dict[str, Report]) -> list[str]:
    lines = [
        "| deployment | requests/s | gain: equal GPUs | gain: equal cost "
        "| pays from (Gbit/s): GPUs / cost | the same money in the remote GPUs alone |",
        "|---|---|---|---|---|---|",
    ]
    for example in EXAMPLES:
        report = reports[example.config]
        rate, alone = report["prfaas_pd"]["lambda_max_rps"], report["remote_only_rps"]
        other = "no price" if alone is None else f"{alone:.1f} requests/s ({rate / alone:.2f})"
        begins = [report["pays_from_gbps"][name] for name in ("homogeneous", "equal_cost")]
        known = [report["ratios"][f"prfaas_over_{n}"] for n in ("homogeneous", "equal_cost")]
        pays = [
            "no price" if ratio is None else "never" if gbps is None else f"{gbps:.2g}"
            for gbps, ratio in zip(begins, known, strict=True)
        ]
        lines.append(
            f"| [{example.title}](#{anchor(example.title)}) | {rate:.1f} "
            f"| {gain(report, 'homogeneous')} | {gain(report, 'equal_cost')} "
            f"| {' / '.join(pays)} | {other} |"
        )
    return lines


def anchor(title: str) -> str:
    """The anchor that GitHub gives a heading."""
    kept = [c for c in title.lower() if c.isalnum() or c in " -"]
    return "".join(kept).replace(" ", "-")


class Outputs(NamedTuple):
    """What the commands of one example have printed and drawn."""

    report: Report
    picture: bytes
    plan: str
    simulation: str


def run_example(example: Example) -> Outputs:
    config = ROOT / "configs" / f"{example.config}.toml"
    with tempfile.TemporaryDirectory() as folder:
        report = json.loads(run([*example.plan, "--json", "--plot", folder]))
        picture = (Path(folder) / "gain_map.png").read_bytes()
    report["remote_only_rps"] = remote_only_rps(config)
    mean_tokens = round(report["map"]["own"]["mean_tokens"])
    report["pays_from_gbps"] = own_pays_from(config, mean_tokens)
    # The page has the map as a picture, so the text is that of the plan alone. Examples run side by
    # side, so a command has one worker.
    simulation = run([*example.simulate, "--workers", "1"])
    return Outputs(report, picture, run(example.plan[:-1]), simulation)


@click.command(help=__doc__)
@click.option(
    "--docs", default=DOCS, type=click.Path(path_type=Path), help="Folder of the documentation."
)
@workers_options
def main(docs: Path, workers: Workers) -> None:
    with progress_bar("examples", len(EXAMPLES)) as show:
        cases = {example.config: example for example in EXAMPLES}
        found = run_all(run_example, cases, workers, progress=show)
    sections: dict[str, Sequence[str]] = {}
    (docs / "img").mkdir(parents=True, exist_ok=True)
    for example in EXAMPLES:
        name = example.config
        report, picture, plan, simulation = found[name]
        (docs / "img" / f"examples-{name}.png").write_bytes(picture)
        sections[f"plan {name}"] = [*command([*example.plan, "--plot", "out/"]), *shown(plan)]
        sections[f"simulate {name}"] = [*command(example.simulate), *shown(simulation)]
        sections[f"answer {name}"] = [
            f"- {answer(report, 'homogeneous', 'as many GPUs in one cluster of the local kind')}",
            f"- {answer(report, 'equal_cost', 'the same money in one cluster of the local kind')}",
            f"- {binding(report)} {beginning(report)}",
            f"- {first_measurement(report)}",
        ]
    reports = {name: outputs.report for name, outputs in found.items()}
    sections["summary"] = summary(reports)
    page = docs / "examples.md"
    page.write_text(fill(page.read_text(encoding="utf-8"), sections), encoding="utf-8")
    kept = ("ratios", "ranges", "pays_from_gbps", "remote_only_rps")
    print(json.dumps({n: {k: r.get(k) for k in kept} for n, r in reports.items()}, indent=2))


if __name__ == "__main__":
    run_benchmark(main)
