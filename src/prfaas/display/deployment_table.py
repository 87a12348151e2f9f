"""The live table of `prfaas up`, from the gateway's state. Pure except for rich."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prfaas.launch.request_outcomes import RequestOutcomes
from prfaas.scheduler.congestion import LinkVerdict


def live_view(state: Mapping[str, Any], outcomes: RequestOutcomes) -> RenderableType:
    said = (*service_lines(state), *plan_lines(state))
    lines = Text("\n".join((*said, hits_line(outcomes), links_line(state))))
    return Group(nodes_table(state), routes_table(outcomes), lines)


def nodes_table(state: Mapping[str, Any]) -> Table:
    table = Table(title=f"policy {state['policy']}", title_justify="left")
    for column, justify in (
        ("node", "left"),
        ("role", "left"),
        ("running", "right"),
        ("queue", "right"),
        ("wait (s)", "right"),
        ("KV held", "right"),
    ):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for cluster in state["clusters"]:
        for node in cluster["nodes"]:
            table.add_row(*node_row(cluster["cluster"], node))
    return table


def service_lines(state: Mapping[str, Any]) -> list[str]:
    """PD clusters that are not served as planned, and why."""
    return [
        f"{home['cluster']} is {home['service']}: {home['reason']}"
        for home in state["homes"]
        if home["service"] != "served"
    ]


def plan_lines(state: Mapping[str, Any]) -> list[str]:
    """The plan with its reason and, with `--advise`, the advised plan."""
    return [
        f"{name}: threshold {plan['threshold_tokens']:,} tokens, {split(plan)}, "
        f"{plan['age_s']:.0f} s ago: {plan['reason']}"
        for name, plan in (("plan", state["plan"]), ("advice", state["advice"]))
        if plan is not None and plan["made"]
    ]


def split(plan: Mapping[str, Any]) -> str:
    roles = list(plan["roles"].values())
    return f"{roles.count('prefill')} prefill + {roles.count('decode')} decode"


def node_row(cluster: str, node: Mapping[str, Any]) -> list[str]:
    name = str(node["node"] or node["kvd_url"])
    if not node["alive"]:
        return [name, "not alive", "", "", "", ""]
    if node["incompatible"]:
        return [name, f"incompatible: {', '.join(node['incompatible'])}", "", "", "", ""]
    role = f"{cluster} {node.get('role', 'not in use')}"
    if node.get("becomes") is not None:
        role += f", {'drains' if node['draining'] else 'copies'} to become {node['becomes']}"
    return [
        name,
        role,
        f"{node.get('running', 0):.0f}",
        f"{node.get('waiting', 0):.0f}",
        f"{node.get('wait_s', 0.0):.1f}",
        held(node),
    ]


def held(node: Mapping[str, Any]) -> str:
    """The KV that the node's pools hold, by form where it has several."""
    forms = node.get("forms") or {}
    if len(forms) > 1:
        used = {form: pool["cache"]["used_bytes"] / 2**20 for form, pool in forms.items()}
        return ", ".join(f"{form} {mib:.1f} MiB" for form, mib in used.items())
    cache = node.get("cache")
    return "" if cache is None else f"{cache['used_bytes'] / 2**20:.1f} MiB"


def routes_table(outcomes: RequestOutcomes) -> Table:
    table = Table()
    for column in ("route", "completed", "not completed", "TTFT p50 (s)", "p90 (s)", "hand-offs"):
        table.add_column(column, justify="left" if column == "route" else "right")
    for route, what in (("local", "prefilled locally"), ("remote", "offloaded")):
        ends = {o: n for (r, o), n in outcomes.counts.items() if r == route}
        completed = ends.pop("completed", 0)
        others = ", ".join(f"{count} {outcome}" for outcome, count in sorted(ends.items()))
        ttfts = outcomes.ttfts_s(route)
        p50, p90 = (f"{q:.3f}" for q in np.quantile(ttfts, (0.5, 0.9))) if ttfts else ("-", "-")
        forms = {form: n for (r, form), n in outcomes.forms.items() if r == route}
        handed = ", ".join(f"{count} {form}" for form, count in sorted(forms.items()))
        table.add_row(what, str(completed), others, p50, p90, handed)
    return table


def hits_line(outcomes: RequestOutcomes) -> str:
    cached, total = outcomes.cached_tokens, outcomes.prompt_tokens
    return f"cached: {cached:,} of {total:,} prompt tokens ({cached / max(1, total):.0%})"


def links_line(state: Mapping[str, Any]) -> str:
    lines = []
    for link in state["links"]:
        verdict = LinkVerdict(link["verdict"]).name.lower() if link["up"] else "down"
        lines.append(
            f"{link['from']} -> {link['to']}: {verdict}, "
            f"{link['goodput_bps'] / 1e6:.1f} of {link['capacity_bps'] / 1e6:.0f} Mbit/s"
        )
    waiting = state["requests"]
    lines.append(f"{waiting['in_flight']} requests in flight, {waiting['waiting']} waiting")
    return "\n".join(lines)
