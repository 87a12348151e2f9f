"""`--workers` and `--cluster` of the commands that run a study."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from prfaas.studies.parallel.workers import Workers, parse_cluster

R = TypeVar("R")


def workers_options(command: Callable[..., R]) -> Callable[..., R]:
    """Adds the two options; the command gets both as `workers`."""

    @click.option(
        "--workers",
        "count",
        type=click.IntRange(1),
        metavar="N",
        help="Cases that run at the same time; the results are the same for every number.  "
        "[default: all cores of this process, or of the cluster]",
    )
    @click.option(
        "--cluster",
        metavar="ADDRESS",
        help="Run the cases on a Ray cluster that exists already: ray:auto, ray:HOST:PORT or "
        "ray://HOST:PORT. Its machines need the same versions of Python and prfaas.",
    )
    @functools.wraps(command)
    def with_workers(*args: Any, count: int | None, cluster: str | None, **options: Any) -> R:
        address = None if cluster is None else parse_cluster(cluster)
        return command(*args, workers=Workers(count, address), **options)

    return with_workers
