"""The live table of `prfaas up` for several PD clusters, from the states of their gateways. Pure
except for rich. A key that a gateway does not report is shown as a dash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from prfaas.display.deployment_table import hits_line, routes_table
from prfaas.launch.request_outcomes import RequestOutcomes
from prfaas.scheduler.congestion import LinkVerdict

State = Mapping[str, Any]
ALL = "all"  # the gateway that serves every PD cluster
UNKNOWN = "-"


def regions_view(states: Mapping[str, State], outcomes: RequestOutcomes) -> RenderableType:
    """`states` has the state of the gateway of each PD cluster."""
    gateways = distinct_gateways(states)
    seen = list(gateways.values())
    tables = (clusters_table(seen), links_table(seen), gateways_table(gateways))
    return Group(*tables, routes_table(outcomes), Text(hits_line(outcomes)))


def distinct_gateways(states: Mapping[str, State]) -> dict[str, State]:
    """The states by the name of the gateway: its PD cluster, or `all`."""
    if len(states) > 1 and len({id(state) for state in states.values()}) == 1:
        return {ALL: next(iter(states.values()))}
    return dict(states)


def clusters_table(states: Sequence[State]) -> Table:
    title = f"policy {states[0].get('policy', UNKNOWN)}"
    table = _table(title, ("cluster", "kind", "nodes"), ("in use", "drained", "queue", "active"))
    for cluster in states[0].get("clusters", []):
        table.add_row(*cluster_row(cluster))
    return table


def cluster_row(cluster: Mapping[str, Any]) -> list[str]:
    nodes = cluster.get("nodes", [])
    alive = [node for node in nodes if node.get("alive")]
    roles = Counter(str(node.get("role", "no role")) for node in alive)
    shown = " + ".join(f"{count} {role}" for role, count in sorted(roles.items())) or "none"
    if len(alive) < len(nodes):
        shown += f", {len(nodes) - len(alive)} not alive"
    drained = cluster.get("drained")
    return [
        str(cluster.get("cluster", UNKNOWN)),
        str(cluster.get("kind", UNKNOWN)),
        shown,
        f"{sum(bool(node.get('in_use')) for node in nodes)} of {len(nodes)}",
        UNKNOWN if drained is None else "yes" if drained else "no",
        # The engines' own counts, which are of the requests of all gateways.
        f"{sum(node.get('waiting', node.get('queued', 0)) for node in alive):.0f}",
        f"{sum(node.get('running', node.get('active', 0)) for node in alive):.0f}",
    ]


def links_table(states: Sequence[State]) -> Table:
    """Each link once, as the first gateway that knows it sees it."""
    table = _table("", ("link", "verdict"), ("rate (Mbit/s)", "capacity (Mbit/s)", "waits (s)"))
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for state in states:
        for link in state.get("links", []):
            found.setdefault((link["from"], link["to"]), link)
    for (source, target), link in found.items():
        verdict = LinkVerdict(link["verdict"]).name.lower() if link["up"] else "down"
        rates = (link["goodput_bps"] / 1e6, link["capacity_bps"] / 1e6)
        table.add_row(
            f"{source} -> {target}",
            verdict,
            *(f"{rate:,.1f}" for rate in rates),
            f"{link.get('waited_s', 0.0):.1f}",
        )
    return table


def gateways_table(gateways: Mapping[str, State]) -> Table:
    table = _table(
        "", ("gateway", "threshold (tokens)"), ("in flight", "waiting", "other gateways", "plans")
    )
    for name, state in gateways.items():
        requests = state.get("requests", {})
        table.add_row(
            name,
            thresholds(name, state),
            str(requests.get("in_flight", UNKNOWN)),
            str(requests.get("waiting", UNKNOWN)),
            peers(state),
            plans_here(name, state),
        )
    return table


def thresholds(gateway: str, state: State) -> str:
    """The threshold of each home in the plan that the gateway follows."""
    plan = state.get("plan") or {}
    homes = plan.get("homes", {gateway: plan})
    known = {
        home: f"{one['threshold_tokens']:,}"
        for home, one in homes.items()
        if one.get("threshold_tokens") is not None
    }
    return ", ".join(f"{home} {tokens}" for home, tokens in known.items()) or "no plan yet"


def peers(state: State) -> str:
    others = [one for one in state.get("gateways") or [] if not one.get("here")]
    if not others:
        return UNKNOWN
    return f"{sum(bool(one.get('alive')) for one in others)} of {len(others)} alive"


def plans_here(gateway: str, state: State) -> str:
    """Whether this gateway plans. One that serves all has no other that could."""
    planner = state.get("planner")
    if planner is None:
        return "yes" if gateway == ALL else UNKNOWN
    epoch = f"epoch {planner.get('epoch', UNKNOWN)}"
    return f"yes, {epoch}" if planner.get("here") else f"no ({planner.get('cluster') or 'none'})"


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    table = Table(title=title or None, title_justify="left")
    for column in left:
        table.add_column(column)
    for column in right:
        table.add_column(column, justify="right")
    return table
