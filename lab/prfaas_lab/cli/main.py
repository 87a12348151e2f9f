"""`python -m prfaas_lab`: the laboratory's commands. Errors end them as they end `prfaas`."""

from __future__ import annotations

import click

from prfaas import __version__
from prfaas.cli.main import LazyGroup

COMMANDS = {
    "bench": "Run a benchmark of this checkout.",
    "soak": "Serve traffic while a fault strikes every few seconds, and check every answer.",
    "reference": "Print a page of docs/ that is made from the schema.",
}


class LabGroup(LazyGroup):
    package = "prfaas_lab.cli"
    summaries = COMMANDS


@click.group(
    cls=LabGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="prfaas")
def lab() -> None:
    """The laboratory of prfaas: what only its tests, its benchmarks and its releases use.

    It lies in lab/ of a checkout, and is not published.

    \b
    Start here, in the top folder of a checkout:
      python -m prfaas_lab bench                     which benchmarks are there?
      python -m prfaas_lab bench transport           run one of them; it prints JSON
      python -m prfaas_lab bench serve --help        what does a benchmark accept?
      python -m prfaas_lab soak --minutes 3          does a deployment survive its faults?
      python -m prfaas_lab soak --minutes 15 --no-faults --hostile
      python -m prfaas_lab reference configuration > docs/configuration.md
      python -m prfaas_lab reference api > docs/api.md
    """
