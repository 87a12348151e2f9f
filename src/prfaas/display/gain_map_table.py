"""A gain map as text: prompt lengths down, link bandwidths across."""

from __future__ import annotations

from rich.table import Table

from prfaas.studies.gain_map import PAYS, Beginning, GainMap, MapRow

CAPTION = "columns: Gbit/s of the link; threshold and split are the best of each cell"
RANGES = "; in parentheses: from the 5% to the 95% quantile of the errors of the estimates"


def gain_map_tables(gains: GainMap) -> list[Table]:
    """One table per baseline that the map has."""
    tables = []
    for name, text in (
        ("over_homogeneous", "the same number of GPUs"),
        ("over_equal_cost", "the same cost"),
    ):
        if any(gain is not None for row in gains.rows for gain in getattr(row, name)):
            tables.append(_table(gains, name, f"gain over one PD cluster of {text}"))
    return tables


def gain_map_notes(gains: GainMap) -> list[str]:
    """What the tables cannot say: the deployment's own place, and lengths that do not fit."""
    own = gains.own
    here = f"this deployment: {own.gbps:g} Gbit/s, {own.mean_tokens:,.0f} tokens per prompt"
    refused = [row for row in gains.rows if row.refused is not None]
    return [here, *(f"{row.mean_tokens:,} tokens: {row.refused}" for row in refused)]


def _table(gains: GainMap, name: str, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("mean prompt", justify="right")
    for gbps in gains.links_gbps:
        table.add_column(f"{gbps:g}", justify="right")
    table.add_column("pays from", justify="right")
    for row in gains.rows:
        cells = [_shown(gain) for gain in getattr(row, name)]
        table.add_row(f"{row.mean_tokens:,}", *cells, _pays_from(gains, row, name))
    table.caption = CAPTION + (RANGES if gains.estimated else "")
    return table


def _shown(gain: float | None) -> str:
    if gain is None:
        return "-"
    return f"[green]{gain:.2f}[/]" if gain > PAYS else f"{gain:.2f}"


def _pays_from(gains: GainMap, row: MapRow, name: str) -> str:
    if row.refused is not None:
        return "-"
    begins: Beginning = getattr(row, f"pays_{name}")
    middle = _bandwidth(gains, begins.gbps)
    if not gains.estimated:
        return middle
    ends = (_bandwidth(gains, begins.low), _bandwidth(gains, begins.high))
    return f"{middle} ({ends[0]})" if ends[0] == ends[1] else f"{middle} ({ends[0]} - {ends[1]})"


def _bandwidth(gains: GainMap, gbps: float | None) -> str:
    if gbps is None:
        return "never"
    return f"{gbps:.2g}" if gbps > gains.links_gbps[0] else "always"
