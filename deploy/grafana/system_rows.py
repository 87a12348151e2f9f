"""The rows on caches, faults, plans, tenants and processes."""

from __future__ import annotations

from panels import DEPLOYMENT, Panel, Query, Row, now, quantile, rate, ratio

_POOL = "instance, form"

SYSTEM_ROWS = (
    Row(
        "Cache and memory",
        (
            Panel(
                "Cache hits",
                "The share of the prompt tokens that were served from a cache, by route.",
                "percentunit",
                (
                    Query(
                        ratio(
                            rate("gateway_cached_tokens_total", "route"),
                            rate("gateway_prompt_tokens_total", "route"),
                        ),
                        "{{route}}",
                    ),
                ),
            ),
            Panel(
                "Reuse lost for want of a state",
                "Tokens per second whose blocks were cached, but had to be computed again because "
                "no state or window to resume from was left.",
                "short",
                (
                    Query(rate("gateway_stateless_tokens_total"), "of requests"),
                    Query(
                        rate("kvd_pool_stateless_tokens_total", "instance"), "lookups, {{instance}}"
                    ),
                ),
            ),
            Panel(
                "KV memory",
                "Held by requests and transfers, as a share. The rest has cached prefixes or is "
                "free.",
                "percentunit",
                (
                    Query(
                        ratio(
                            now("kvd_pool_memory_bytes", _POOL, only='state="held"'),
                            now("kvd_pool_memory_bytes", _POOL),
                        ),
                        "held, {{instance}} {{form}}",
                    ),
                    Query(
                        ratio(
                            now("kvd_pool_memory_bytes", _POOL, only='state="idle"'),
                            now("kvd_pool_memory_bytes", _POOL),
                        ),
                        "cached, {{instance}} {{form}}",
                    ),
                ),
            ),
            Panel(
                "Grants refused",
                "Grants that decode nodes refused for want of memory, and reservations of any kind "
                "that pools refused, per second.",
                "ops",
                (
                    Query(rate("gateway_refused_grants_total"), "grants"),
                    Query(
                        rate("kvd_pool_refused_reservations_total", "instance"),
                        "reservations, {{instance}}",
                    ),
                ),
            ),
            Panel(
                "Evictions and the SSD tier",
                "Blocks per second.",
                "ops",
                (
                    Query(rate("kvd_pool_evicted_blocks_total"), "evicted"),
                    Query(rate("kvd_pool_spilled_blocks_total"), "written to SSD"),
                    Query(rate("kvd_pool_promoted_blocks_total"), "read back from SSD"),
                    Query(rate("kvd_pool_dropped_blocks_total"), "dropped, not on SSD"),
                ),
            ),
            Panel(
                "Copies of prefixes",
                "Between nodes, by why they were made, and tokens that they brought.",
                "ops",
                (
                    Query(
                        rate("gateway_prefix_copies_total", "why", "outcome"), "{{why}} {{outcome}}"
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Faults",
        (
            Panel(
                "Retries",
                "Attempts after the first, and requests that got an error because no retry was "
                "left, per second.",
                "ops",
                (
                    Query(rate("gateway_retries_total"), "retries"),
                    Query(rate("gateway_denied_retries_total"), "denied"),
                ),
            ),
            Panel(
                "Retry budget",
                "Retries that all requests of a gateway together may make now.",
                "short",
                (Query(now("gateway_retry_budget", "instance", "min"), "{{instance}}"),),
            ),
            Panel(
                "Nodes by state",
                "As the gateways see them.",
                "short",
                (
                    Query(
                        "sum by (cluster, state) (max by (cluster, node, state) "
                        f"(prfaas_gateway_node_state{{{DEPLOYMENT}}}))",
                        "{{cluster}} {{state}}",
                    ),
                ),
            ),
            Panel(
                "PD clusters that are not served as planned",
                "1 while decode nodes prefill for themselves or another PD cluster decodes "
                "(degraded), or while requests cannot be served (unserved).",
                "short",
                tuple(
                    Query(
                        now("gateway_home_service", "home", "max", only=f'level="{level}"'),
                        f"{{{{home}}}} {level}",
                    )
                    for level in ("degraded", "unserved")
                ),
            ),
            Panel(
                "PrfaaS clusters that take requests",
                "1 while a node of the PrfaaS cluster is in use and the link is not cut. Absent "
                "while the cluster is drained.",
                "short",
                (
                    Query(
                        now("gateway_prefill_cluster_usable", "home, cluster", "min"),
                        "{{cluster}} for {{home}}",
                    ),
                ),
            ),
            Panel(
                "Silent nodes and failed transfers",
                "How often a node fell silent, and incoming transfers that failed, per second.",
                "ops",
                (
                    Query(rate("gateway_node_silences_total"), "silent nodes"),
                    Query(
                        rate("kvd_failed_transfers_total", "instance"),
                        "failed transfers, {{instance}}",
                    ),
                ),
            ),
        ),
    ),
    Row(
        "Plan",
        (
            Panel(
                "Roles of the plan",
                "Nodes by their role in the plan, and nodes that do not have it yet.",
                "short",
                (
                    Query(
                        now("gateway_plan_nodes", "cluster, role", "max"), "{{cluster}} {{role}}"
                    ),
                    Query(now("gateway_roles_pending", "cluster", "max"), "{{cluster}} pending"),
                ),
            ),
            Panel(
                "Plans and conversions",
                "Plans that were made or followed, and nodes that changed their role, per second.",
                "ops",
                (
                    Query(rate("gateway_plans_total"), "plans"),
                    Query(rate("gateway_conversions_total", "role"), "to {{role}}"),
                ),
            ),
            Panel(
                "Planned capacity and traffic",
                "Requests per second that the plan can serve, and those that ended.",
                "reqps",
                (
                    Query(
                        now("gateway_plan_capacity_requests_per_second", "cluster", "max"),
                        "planned {{cluster}}",
                    ),
                    Query(rate("gateway_requests_total"), "served"),
                ),
            ),
            Panel(
                "Prefill pace",
                "Observed prefill time divided by the profile's. Above 1: slower than planned.",
                "short",
                (Query(now("gateway_prefill_pace_ratio", "cluster", "max"), "{{cluster}}"),),
            ),
            Panel(
                "Gateways",
                "Gateways that make plans, of which there must be one, and those that are ready.",
                "short",
                (
                    Query(now("gateway_planner"), "make plans"),
                    Query(now("gateway_ready"), "ready"),
                ),
            ),
        ),
    ),
    Row(
        "Tenants",
        (
            Panel(
                "Requests of tenants",
                "Requests that ended, per second.",
                "reqps",
                (
                    Query(
                        rate("gateway_tenant_requests_total", "tenant", "outcome"),
                        "{{tenant}} {{outcome}}",
                    ),
                ),
                stacked=True,
            ),
            Panel(
                "Refused requests of tenants",
                "Requests that a limit refused, per second.",
                "reqps",
                (Query(rate("gateway_tenant_refused_requests_total", "tenant"), "{{tenant}}"),),
            ),
            Panel(
                "Load of tenants",
                "Requests in flight, and requests that wait for a node.",
                "short",
                (
                    Query(now("gateway_tenant_requests_in_flight", "tenant"), "{{tenant}}"),
                    Query(
                        now("gateway_tenant_requests_waiting", "tenant"), "{{tenant}}, without node"
                    ),
                ),
            ),
            Panel(
                "Waiting tokens of tenants",
                "Prompt tokens of requests that have no first token yet.",
                "short",
                (Query(now("gateway_tenant_waiting_tokens", "tenant"), "{{tenant}}"),),
                stacked=True,
            ),
        ),
    ),
    Row(
        "Processes",
        (
            Panel(
                "Event-loop lag of gateways",
                "Every stream stands still for as long. Own: the gateway itself used the CPU.",
                "s",
                (
                    Query(
                        quantile(0.99, "gateway_loop_lag_seconds", "instance"), "P99 {{instance}}"
                    ),
                    Query(
                        now("gateway_loop_lag_max_seconds", "instance", "max"),
                        "largest {{instance}}",
                    ),
                    Query(
                        now("gateway_loop_lag_own_max_seconds", "instance", "max"),
                        "largest own {{instance}}",
                    ),
                ),
            ),
            Panel(
                "Late kvds",
                "The share of the last minute in which a kvd had work to do and could not run.",
                "percentunit",
                (Query(now("kvd_late_ratio", "instance", "max"), "{{instance}}"),),
            ),
            Panel(
                "Worker processes",
                "Workers of kvds that ended unexpectedly, and body workers of gateways that were "
                "lost, per second.",
                "ops",
                (
                    Query(rate("kvd_replaced_workers_total", "instance"), "kvd {{instance}}"),
                    Query(
                        rate("gateway_body_workers_lost_total", "instance", "reason"),
                        "gateway {{instance}}: {{reason}}",
                    ),
                ),
            ),
            Panel(
                "Request bodies",
                "Bytes of the bodies of requests in flight.",
                "bytes",
                (Query(now("gateway_body_bytes", "instance"), "{{instance}}"),),
            ),
            Panel(
                "Requests at engines",
                "As the engines report them.",
                "short",
                (
                    Query(
                        now("num_requests_running", "instance", prefix="vllm:"),
                        "{{instance}} running",
                    ),
                    Query(
                        now("num_requests_waiting", "instance", prefix="vllm:"),
                        "{{instance}} waiting",
                    ),
                ),
            ),
            Panel(
                "Time between tokens at engines",
                "P90, as the engines report it.",
                "s",
                (
                    Query(
                        quantile(0.9, "inter_token_latency_seconds", "instance", prefix="vllm:"),
                        "{{instance}}",
                    ),
                ),
            ),
        ),
    ),
)
