"""Options that all serving commands share: `--log-level` and `--set`."""

from __future__ import annotations

import logging

import click

log_level_option = click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    help="Least severe messages that are logged to standard error.",
)

set_option = click.option(
    "--set",
    "assignments",
    multiple=True,
    metavar="KEY=VALUE",
    help="Set one key of docs/configuration.md; repeatable, and wins over the file.",
)


def configure_logging(level: str) -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(name)s %(message)s")
