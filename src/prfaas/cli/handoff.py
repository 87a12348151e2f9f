"""`prfaas handoff`: hands one request from a prefill node to a decode node; times every step."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import get_args

import click
from rich.table import Table

from prfaas.cli.shared_options import as_input_error, read_key
from prfaas.clock import MonotonicClock
from prfaas.config.tls import TlsSection
from prfaas.display.console import console, print_json
from prfaas.errors import InputError, PeerError
from prfaas.security.tls import load_identity
from prfaas.studies.single_handoff import HandoffReport, HandoffRequest, NodePair, run_handoff
from prfaas.types import Form

DEFAULT_MAX_TOKENS = 16
# Generated prompts use ids that every vocabulary has, and that are text in a byte-level one.
_GENERATED_IDS = range(32, 127)


@click.command()
@click.argument("prefill_url")
@click.argument("decode_url")
@click.option("--prompt", help="Text of the prompt; the decode node tokenises it.")
@click.option("--tokens", type=int, help="Length of a generated prompt, instead of --prompt.")
@click.option("--seed", default=0, show_default=True, help="Seed of the generated prompt.")
@click.option(
    "--prefill-kvd", help="URL of the prefill node's kvd.  [default: as `prfaas node` reports it]"
)
@click.option(
    "--decode-kvd", help="URL of the decode node's kvd.  [default: as `prfaas node` reports it]"
)
@click.option(
    "--member-key-file",
    type=click.Path(path_type=Path),
    help="File with the key that nodes and kvds of the deployment require.",
)
@click.option("--tls-ca", metavar="FILE", help="CA certificate of the deployment.")
@click.option("--tls-cert", metavar="FILE", help="Certificate of this host.")
@click.option("--tls-key", metavar="FILE", help="Private key of the certificate.")
@click.option(
    "--max-tokens",
    default=DEFAULT_MAX_TOKENS,
    show_default=True,
    help="Maximum number of tokens to generate.",
)
@click.option(
    "--salt",
    default="",
    help="Cache salt of the tenant.  [default: none; with --compare an unused one]",
)
@click.option(
    "--form",
    type=click.Choice(get_args(Form)),
    help="Form in which the state travels.  [default: native between equal engines, or canonical]",
)
@click.option(
    "--compare",
    is_flag=True,
    help="Let the prefill node also compute the whole answer, with the prompt cut at the same "
    "lengths, and fail when the hand-off has changed the answer.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def handoff(
    prefill_url: str,
    decode_url: str,
    prompt: str | None,
    tokens: int | None,
    seed: int,
    prefill_kvd: str | None,
    decode_kvd: str | None,
    member_key_file: Path | None,
    tls_ca: str | None,
    tls_cert: str | None,
    tls_key: str | None,
    max_tokens: int,
    salt: str,
    form: Form | None,
    compare: bool,
    as_json: bool,
) -> None:
    """Prefill one prompt at PREFILL_URL, transfer its state, and decode it at DECODE_URL.

    Use this command to check a new pair of nodes, prfaas nodes or vLLM servers, without a gateway.
    It shows the time and the bytes of the grant, the prefill, the transfer's commit and the decode.

    \b
      prfaas handoff http://prefill:8000 http://decode:8000 --tokens 4000 --compare
      prfaas handoff http://p:8000 http://d:8000 --prompt "Once" --decode-kvd http://d:7000
    """
    if (prompt is None) == (tokens is None):
        raise InputError(
            "exactly one of --prompt and --tokens is required", fix="give either of them"
        )
    if tokens is not None and tokens < 1:
        raise InputError(f"{tokens} is out of range", where="--tokens", fix="give 1 or more")
    if prompt is None:
        sent: str | list[int] = random.Random(seed).choices(_GENERATED_IDS, k=tokens or 1)
    else:
        sent = prompt
    pair = NodePair(
        prefill_url.rstrip("/"),
        decode_url.rstrip("/"),
        prefill_kvd,
        decode_kvd,
        read_key(member_key_file),
        load_identity(TlsSection(tls_ca, tls_cert, tls_key), "--tls"),
    )
    request = HandoffRequest(sent, max_tokens, salt, compare, form=form)
    try:
        report = asyncio.run(run_handoff(pair, request, MonotonicClock()))
    except PeerError as error:
        raise as_input_error(error) from None
    if as_json:
        print_json(report.as_dict())
    else:
        _show(report)
    if report.comparison is not None and not report.comparison.same:
        raise click.ClickException("the hand-off changed the answer")


def _show(report: HandoffReport) -> None:
    screen = console()
    title = f"prompt of {report.prompt_tokens:,} tokens, {report.handoff_tokens:,} handed off"
    if report.form is not None:
        title += f" in the {report.form} form"
    table = Table(title=title, title_justify="left")
    table.add_column("step")
    for column in ("began (ms)", "took (ms)", "bytes"):
        table.add_column(column, justify="right")
    table.add_column("")
    for step in report.steps:
        nbytes = "" if step.nbytes is None else f"{step.nbytes:,}"
        table.add_row(
            step.name, f"{step.began_s * 1e3:,.1f}", f"{step.took_s * 1e3:,.1f}", nbytes, step.note
        )
    screen.print(table)
    screen.print(f"answer: {report.text!r}", markup=False)
    if report.comparison is not None:
        screen.print(str(report.comparison), markup=False)
