"""What a panel of the dashboard is, and the queries that panels have.

Every query selects the deployments of the variable `$deployment`; rates are over Grafana's
`$__rate_interval`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["timeseries", "state-timeline"]


class Query(NamedTuple):
    expression: str  # PromQL
    legend: str


class Panel(NamedTuple):
    title: str
    description: str
    unit: str
    queries: Sequence[Query]
    kind: Kind = "timeseries"
    stacked: bool = False


class Row(NamedTuple):
    title: str
    panels: Sequence[Panel]


DEPLOYMENT = 'deployment=~"$deployment"'
_RANGE = "[$__rate_interval]"


def rate(metric: str, *by: str, only: str = "") -> str:
    """The sum of a counter's rates."""
    where = f"{DEPLOYMENT},{only}" if only else DEPLOYMENT
    grouped = f"sum by ({', '.join(by)}) " if by else "sum "
    return f"{grouped}(rate(prfaas_{metric}{{{where}}}{_RANGE}))"


def quantile(share: float, metric: str, *by: str, prefix: str = "prfaas_", only: str = "") -> str:
    where = f"{DEPLOYMENT},{only}" if only else DEPLOYMENT
    labels = ", ".join((*by, "le"))
    buckets = f"sum by ({labels}) (rate({prefix}{metric}_bucket{{{where}}}{_RANGE}))"
    return f"histogram_quantile({share:g}, {buckets})"


def now(
    metric: str, by: str = "", how: str = "sum", only: str = "", prefix: str = "prfaas_"
) -> str:
    """A gauge, summed up or otherwise aggregated."""
    where = f"{DEPLOYMENT},{only}" if only else DEPLOYMENT
    grouped = f"{how} by ({by}) " if by else f"{how} "
    return f"{grouped}({prefix}{metric}{{{where}}})"


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"
