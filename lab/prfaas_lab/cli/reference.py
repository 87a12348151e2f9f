"""`python -m prfaas_lab reference`: the pages of docs/ that are made from the schema."""

from __future__ import annotations

import click

from prfaas_lab.documents import api as api_page
from prfaas_lab.documents import configuration as configuration_page


@click.group()
def reference() -> None:
    """Print a page of docs/ that is made from the schema; make docs writes both.

    \b
      python -m prfaas_lab reference configuration > docs/configuration.md
      python -m prfaas_lab reference api > docs/api.md
    """


@reference.command()
def configuration() -> None:
    """Print docs/configuration.md: every key of the deployment, host and question files."""
    click.echo(configuration_page.reference(), nl=False)


@reference.command()
def api() -> None:
    """Print docs/api.md: every request parameter, and what becomes of it."""
    click.echo(api_page.reference(), nl=False)
