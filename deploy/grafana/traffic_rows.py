"""The rows on requests, on where they go, and on the links."""

from __future__ import annotations

from panels import Panel, Query, Row, now, quantile, rate, ratio

_LINK = "source, target"
_ON_LINK = "{{source}} to {{target}}"

TRAFFIC_ROWS = (
    Row(
        "Requests",
        (
            Panel(
                "Requests by outcome",
                "Requests that ended, per second. Shed: refused with 429 or 503. Broken: the "
                "stream broke off. Failed: another error of the deployment. Rejected: an error "
                "of the client.",
                "reqps",
                (Query(rate("gateway_requests_total", "outcome"), "{{outcome}}"),),
                stacked=True,
            ),
            Panel(
                "Time to first token",
                "Of streamed answers, from the arrival at the gateway.",
                "s",
                tuple(
                    Query(
                        quantile(share, "gateway_time_to_first_token_seconds", "route"),
                        f"P{share * 100:g} {{{{route}}}}",
                    )
                    for share in (0.5, 0.9, 0.99)
                ),
            ),
            Panel(
                "Requests in flight and waiting",
                "Waiting requests have no node yet; the name is that of the cluster they wait for.",
                "short",
                (
                    Query(now("gateway_requests_in_flight"), "in flight"),
                    Query(now("gateway_requests_waiting", "cluster"), "waiting for {{cluster}}"),
                ),
            ),
            Panel(
                "Time until a node was found",
                "From the arrival to the start of the latest attempt: reading, tokenising, "
                "waiting, and earlier attempts.",
                "s",
                (
                    Query(quantile(0.5, "gateway_time_to_route_seconds", "route"), "P50 {{route}}"),
                    Query(quantile(0.9, "gateway_time_to_route_seconds", "route"), "P90 {{route}}"),
                ),
            ),
        ),
    ),
    Row(
        "Offloading",
        (
            Panel(
                "Share offloaded, and as planned",
                "The share of the prompts that a PrfaaS cluster prefilled. Planned: the share of "
                "the planned requests above the plan's threshold.",
                "percentunit",
                (
                    Query(
                        ratio(
                            rate("gateway_routed_prompts_total", only='route="remote"'),
                            rate("gateway_routed_prompts_total"),
                        ),
                        "offloaded",
                    ),
                    Query(
                        now("gateway_plan_offloaded_ratio", "cluster", "max"), "planned {{cluster}}"
                    ),
                ),
            ),
            Panel(
                "Why prompts go where they go",
                "Routed prompts per second by route and reason.",
                "reqps",
                (
                    Query(
                        rate("gateway_routed_prompts_total", "route", "reason"),
                        "{{route}}: {{reason}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Threshold against the plan",
                "The plan's threshold, the one in force, and the lengths of what was computed: "
                "under `adaptive` the routes, not the threshold, decide.",
                "short",
                (
                    Query(
                        now("gateway_plan_threshold_tokens", "cluster", "max"), "plan {{cluster}}"
                    ),
                    Query(
                        now("gateway_threshold_tokens", "cluster", "max"), "in force {{cluster}}"
                    ),
                    Query(
                        quantile(0.1, "gateway_uncached_tokens", only='route="remote"'),
                        "P10 of offloaded",
                    ),
                    Query(
                        quantile(0.9, "gateway_uncached_tokens", only='route="local"'),
                        "P90 of local",
                    ),
                ),
            ),
            Panel(
                "Exposed transfer time",
                "From the end of a prefill until its KV was at the decode node: the part of the "
                "transfer that the prefill did not hide.",
                "s",
                tuple(
                    Query(
                        quantile(share, "gateway_exposed_transfer_seconds", "route"),
                        f"P{share * 100:g} {{{{route}}}}",
                    )
                    for share in (0.5, 0.9, 0.99)
                ),
            ),
            Panel(
                "Prefilling clusters",
                "Routed prompts per second by the cluster that prefilled them.",
                "reqps",
                (Query(rate("gateway_routed_prompts_total", "cluster"), "{{cluster}}"),),
                stacked=True,
            ),
            Panel(
                "Hand-offs by form",
                "Native: whole blocks, to an equal engine. Canonical: converted, to any engine.",
                "ops",
                (Query(rate("gateway_handoffs_total", "route", "form"), "{{route}} {{form}}"),),
            ),
        ),
    ),
    Row(
        "Links",
        (
            Panel(
                "Rate",
                "KV bytes that arrive, the rate that the link delivered while bytes waited, and "
                "the rate in the deployment file.",
                "Bps",
                (
                    Query(
                        now("gateway_link_goodput_bytes_per_second", _LINK, "max"),
                        f"{_ON_LINK}: arrives",
                    ),
                    Query(
                        now("gateway_link_estimated_bytes_per_second", _LINK, "max"),
                        f"{_ON_LINK}: estimated",
                    ),
                    Query(
                        now("gateway_link_capacity_bytes_per_second", _LINK, "max"),
                        f"{_ON_LINK}: configured",
                    ),
                ),
            ),
            Panel(
                "Queue",
                "Bytes that wait for the link, and bytes of hand-offs under way, computed or not.",
                "bytes",
                (
                    Query(now("gateway_link_backlog_bytes", _LINK, "max"), f"{_ON_LINK}: backlog"),
                    Query(now("gateway_link_pending_bytes", _LINK), f"{_ON_LINK}: hand-offs"),
                ),
            ),
            Panel(
                "Wait and round trip",
                "How long the oldest byte of the backlog has waited, and the round-trip time.",
                "s",
                (
                    Query(now("gateway_link_waited_seconds", _LINK, "max"), f"{_ON_LINK}: wait"),
                    Query(now("gateway_link_rtt_seconds", _LINK, "max"), f"{_ON_LINK}: round trip"),
                ),
            ),
            Panel(
                "Loss",
                "The share of segments that were lost and sent again. From 0.5% on, the link "
                "counts as congested.",
                "percentunit",
                (Query(now("gateway_link_loss_ratio", _LINK, "max"), _ON_LINK),),
            ),
            Panel(
                "Verdict",
                "0 clear, 1 building, 2 congested. The cause of each change is in the log, and in "
                "the label `cause` of prfaas_gateway_link_verdict_changes_total.",
                "short",
                (Query(now("gateway_link_verdict", _LINK, "max"), _ON_LINK),),
                kind="state-timeline",
            ),
            Panel(
                "Cuts, and changes of verdicts",
                "Cuts of a link per second, and changes of its verdict by the cause.",
                "ops",
                (
                    Query(rate("gateway_link_cuts_total", "source", "target"), f"{_ON_LINK}: cut"),
                    Query(
                        rate("gateway_link_verdict_changes_total", "verdict", "cause"),
                        "{{verdict}} {{cause}}",
                    ),
                ),
            ),
        ),
    ),
)
