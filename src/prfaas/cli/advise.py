"""`prfaas advise`: which hardware to buy for a model, and whether PrfaaS is worth it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click

from prfaas.advisor.answer import Answer
from prfaas.advisor.answer import advise as answer_to
from prfaas.advisor.report import answer_as_dict
from prfaas.advisor.search import Pair
from prfaas.cli.advise_options import apply_flags, question_options
from prfaas.config.advice import parse_question
from prfaas.config.strict import parse_toml, read_text
from prfaas.display.advise_tables import notes, options_table, verdict
from prfaas.display.console import console, print_json, with_progress
from prfaas.studies.advice_deployment import option_toml
from prfaas.studies.advice_market import MarketStudy, Offer


@click.command()
@click.argument("question", required=False, type=click.Path(path_type=Path))
@question_options
@click.option(
    "--write",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the recommended deployment to this file, for prfaas plan and simulate.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def advise(question: Path | None, write: Path | None, as_json: bool, **flags: Any) -> None:
    """Find the hardware for a model and its traffic, and say whether PrfaaS is worth it.

    Give a budget to get the largest rate, or a rate to get the least cost. "Here" is the site of
    the PD cluster, which prefills and decodes; "there" is the site of the PrfaaS cluster, which
    prefills long prompts and sends their KV over the link. The answer compares the best two-site
    deployments with the best single PD cluster of any accelerator. Times that the catalog does not
    have are estimated, and the range of the gain follows from the error of the estimates.

    \b
    What to buy for 150 USD per hour:
      prfaas advise --model qwen3.5-397b-a17b --weights fp8 --prompt-tokens 27000 --budget 150 \\
        --link 100
    The cheapest way to serve 5 requests/s, with two links on offer:
      prfaas advise --model kimi-linear-48b-a3b --prompt-tokens 8000 --rate 5 \\
        --link 10=2000/month --link 100=15000/month
    32 H20 exist here and 16 H200 there; how much do they serve together?
      prfaas advise --model qwen3.5-397b-a17b --weights fp8 --prompt-tokens 27000 --budget 0 \\
        --own h20=32 --own-there h200=16 --link 10 --write deployment.toml
    Only these GPUs, at these prices:
      prfaas advise --model gpt-oss-120b --prompt-tokens 8000 --budget 60 --link 10 \\
        --here h20 --there b200,h200 --price h20=1.5
    The whole question in a file (flags win over it):
      prfaas advise configs/advise/hybrid.toml --budget 200
    """
    file = question or Path("command line")
    raw = parse_toml(read_text(question), question) if question is not None else {}
    apply_flags(raw, flags)
    parsed = parse_question(raw, file)
    offer = MarketStudy(file, parsed).offer()
    answer = answer_to(offer.market, _progress)

    if write is not None:
        write.write_text(option_toml(answer.best.option, parsed, file.parent, write), "utf-8")
    if as_json:
        print_json(_report(answer, offer, write))
        return
    out = console()
    out.print(options_table(answer, parsed.model.name))
    out.print(verdict(answer))
    out.print(notes(answer, offer))
    if write is not None:
        out.print(f"wrote {write}{_what_was_written(answer)}")


def _what_was_written(answer: Answer) -> str:
    groups = answer.best.option.groups
    hardware = " and ".join(f"{group.gpus} x {group.accelerator}" for group in groups)
    if answer.separate is not None and not answer.verdict.worth_it:
        return f": {hardware}, the better of the two PD clusters"
    return f": {hardware}"


def _progress(pairs: Sequence[Pair]) -> Iterable[Pair]:
    return with_progress(pairs, "hardware")


def _report(answer: Answer, offer: Offer, written: Path | None) -> dict[str, Any]:
    return {
        **answer_as_dict(answer),
        "prices": {
            price.accelerator: {"usd_per_gpu_hour": price.usd_per_hour, "source": price.source}
            for price in offer.prices
        },
        "left_out": {left.accelerator: left.reason for left in offer.left_out},
        "written": [] if written is None else [str(written)],
    }
