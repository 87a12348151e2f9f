"""Tables of a plan of several clusters: the PD clusters, the flows between clusters, and what one
more instance or Gbit/s would add."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from prfaas.config import Deployment
from prfaas.display.plan_tables import losses
from prfaas.planner.network.comparison import NetworkComparison
from prfaas.planner.network.plan import Flow, NetworkPlan
from prfaas.planner.network.sensitivity import Gain

# Rows of the table of additions; the others are smaller, and --json has them all.
_MOST_GAINS = 8


def network_tables(comparison: NetworkComparison, deployment: Deployment) -> Group:
    """Everything that `prfaas plan` prints for a deployment with several PD clusters."""
    plan = comparison.plan
    parts: list[RenderableType] = [
        clusters_table(plan, deployment.model.name),
        flows_table(plan),
        binding_line(plan),
        baselines_line(comparison),
        losses(comparison.lost_sites),
        gains_table(comparison),
    ]
    remarks = notes(comparison, deployment)
    return Group(*parts, *([remarks] if remarks else []))


def clusters_table(plan: NetworkPlan, model: str) -> Table:
    """A row per PD cluster, then a row per PrfaaS cluster."""
    title = f"{model}: {plan.rate_rps:.3f} requests/s in total ({plan.reading} reading)"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("cluster")
    table.add_column("kind")
    for column in ("traffic", "req/s", "threshold", "prefill", "decode", "offloaded"):
        table.add_column(column, justify="right")
    table.add_column("prefill busy", justify="right")
    table.add_column("decode busy", justify="right")
    for home in plan.homes:
        threshold = home.threshold_tokens
        table.add_row(
            escape(home.cluster),
            "PD",
            f"{home.share:.1%}",
            f"{home.rate_rps:.3f}",
            "-" if threshold is None else f"{threshold:,d}",
            str(home.n_prefill),
            str(home.n_decode),
            f"{home.offload_fraction:.1%}",
            f"{home.prefill_utilisation:.1%}",
            f"{home.decode_utilisation:.1%}",
        )
    table.add_section()
    for prfaas in plan.prfaas:
        table.add_row(
            escape(prfaas.cluster),
            "PrfaaS",
            "",
            f"{prfaas.rate_rps:.3f}",
            "",
            str(prfaas.instances),
            "",
            "",
            f"{prfaas.utilisation:.1%}",
            "",
        )
    return table


def flows_table(plan: NetworkPlan) -> Table:
    """The matrix of flows: a row per PrfaaS cluster, a column per PD cluster."""
    table = Table(
        title="requests/s prefilled for each PD cluster, KV on the link, its use",
        title_justify="left",
    )
    table.add_column("from \\ to")
    for home in plan.homes:
        table.add_column(escape(home.cluster), justify="right")
    flows = {(flow.source, flow.target): flow for flow in plan.flows}
    for prfaas in plan.prfaas:
        cells = (flows.get((prfaas.cluster, home.cluster)) for home in plan.homes)
        table.add_row(escape(prfaas.cluster), *(_flow_cell(flow) for flow in cells))
    table.add_section()
    kept = (home.rate_rps * (1 - home.offload_fraction) for home in plan.homes)
    table.add_row("prefilled locally", *(f"{rate:.3f} req/s" for rate in kept))
    return table


def gains_table(comparison: NetworkComparison) -> Table:
    table = Table(title="what one more would add to the total", title_justify="left")
    table.add_column("one more")
    table.add_column("req/s", justify="right")
    table.add_column("gain", justify="right")
    for gain in comparison.gains[:_MOST_GAINS]:
        part = gain.gain_rps / comparison.plan.rate_rps
        table.add_row(escape(_place(gain)), f"+{gain.gain_rps:.3f}", f"+{part:.1%}")
    return table


def binding_line(plan: NetworkPlan) -> str:
    if not plan.binding:  # a search that was cut short
        return "No resource is used completely."
    return "Limited by: " + "; ".join(escape(binding.in_words) for binding in plan.binding) + "."


def baselines_line(comparison: NetworkComparison) -> str:
    words = []
    for key, against in (
        ("over_alone", "the PD clusters alone"),
        ("over_one_each", "at most one PrfaaS cluster for each PD cluster"),
        ("over_homogeneous", "as many GPUs in the PD clusters"),
        ("over_equal_cost", "the same money in the PD clusters"),
    ):
        ratio = comparison.ratios[key]
        if ratio is not None:
            words.append(f"[bold]{ratio:.2f}x[/bold] {against}")
    return "Throughput: " + ", ".join(words) + "." if words else "Nothing to compare with."


def notes(comparison: NetworkComparison, deployment: Deployment) -> str:
    lines = []
    plan = comparison.plan
    if plan.gap > 1e-6:
        lines.append(f"The search was cut short: a plan with up to {plan.gap:.2%} more may exist.")
    if deployment.slo.ttft_s is not None:
        lines.append(
            "A plan of several PD clusters has no TTFT, so slo.ttft_s does not change it; "
            "`prfaas simulate` counts the requests that meet it."
        )
    if comparison.alone_rps is None:
        lines.append("Without PrfaaS clusters, a PD cluster cannot prefill.")
    for e in comparison.extrapolations:
        if e.fraction >= 0.01:
            low, high = e.measured_new
            lines.append(
                f"{e.cluster}: {e.fraction:.0%} of its prefills lie beyond the profile's points "
                f"({low:,} to {high:,} new tokens); their times are extrapolated. "
                f"Profile {e.provenance}."
            )
    return "\n".join(f"[dim]- {escape(line)}[/dim]" for line in lines)


def _flow_cell(flow: Flow | None) -> str:
    if flow is None:
        return "no link"
    used = f"{flow.bps / 1e9:.1f} of {flow.link_bps / 1e9:g} Gbit/s"
    return f"{flow.rps:.3f} req/s, {used} ({flow.utilisation:.0%})"


def _place(gain: Gain) -> str:
    if gain.target is None:
        return f"instance at {gain.cluster}"
    return f"Gbit/s on {gain.cluster} -> {gain.target}"
