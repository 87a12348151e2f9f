"""Options that `prfaas up`, `prfaas init` and `prfaas render` share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from prfaas.engine.emulated.pace import Scales

F = TypeVar("F", bound=Callable[..., Any])
_SCALES = Scales()

tenant_option = click.option(
    "--tenant",
    "tenants",
    multiple=True,
    metavar="NAME",
    help="Tenant that gets an API key; repeatable.  [default: one tenant named default]",
)

days_option = click.option(
    "--days",
    type=click.IntRange(1, 3650),
    default=365,
    show_default=True,
    help="Validity of the certificates in days.",
)

_SCALE_OPTIONS = (
    click.option(
        "--time-scale",
        default=_SCALES.time,
        show_default=True,
        help="Factor on the times of emulated engines.",
    ),
    click.option(
        "--byte-scale",
        default=_SCALES.bytes,
        show_default=True,
        help="Factor on the KV bytes of emulated engines.",
    ),
    click.option(
        "--output-scale",
        default=_SCALES.output,
        show_default=True,
        help="Factor on the output tokens of emulated engines.",
    ),
)


def scale_options(command: F) -> F:
    """`--time-scale`, `--byte-scale` and `--output-scale`."""
    for option in reversed(_SCALE_OPTIONS):
        command = option(command)
    return command
