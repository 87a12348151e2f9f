"""The settings of Envoy fit those of the gateway, which decide together how a request ends."""

from __future__ import annotations

from typing import Any

from prfaas.config.gateway import DEFAULTS
from tests.envoy.proxy import cluster_of, manager_of, route_of, settings

TIMEOUTS = DEFAULTS.timeouts
# What serves a request twice when a gateway dies while it has it.
UNSAFE = {"5xx", "gateway-error", "reset", "retriable-4xx", "envoy-ratelimited"}


def seconds(value: str) -> float:
    assert value.endswith("s")
    return float(value[:-1])


def test_streams_have_no_longest_duration_and_an_idle_timeout() -> None:
    route = route_of(settings())
    assert seconds(route["timeout"]) == 0
    longest_s = TIMEOUTS.queue_s + TIMEOUTS.prefill_s + TIMEOUTS.token_s
    assert seconds(route["idle_timeout"]) > longest_s


def test_only_requests_that_no_gateway_has_begun_are_retried() -> None:
    policy = route_of(settings())["retry_policy"]
    assert not UNSAFE & set(policy["retry_on"].split(","))
    assert policy["retriable_status_codes"] == [503]
    assert "per_try_timeout" not in policy and "hedge_policy" not in route_of(settings())


def test_connections_end_at_the_proxy_first() -> None:
    """The gateway closes a connection without a request after `body_s`."""
    options: dict[str, Any] = cluster_of(settings())["typed_extension_protocol_options"]
    (http,) = options.values()
    assert seconds(http["common_http_protocol_options"]["idle_timeout"]) < TIMEOUTS.body_s


def test_envoy_notices_a_gateway_that_stops_before_it_closes_its_port() -> None:
    (check,) = cluster_of(settings())["health_checks"]
    assert check["http_health_check"]["path"] == "/ready"
    # One check may have begun just before, and the next one may take all of its time.
    noticed_s = 2 * seconds(check["interval"]) + seconds(check["timeout"])
    assert noticed_s < TIMEOUTS.leave_s
    assert check["no_traffic_interval"] == check["interval"]


def test_sizes_are_those_of_the_gateway() -> None:
    found = settings()
    manager = manager_of(found)
    assert seconds(manager["request_timeout"]) <= TIMEOUTS.body_s
    (thresholds,) = cluster_of(found)["circuit_breakers"]["thresholds"]
    gateways = len(cluster_of(found)["load_assignment"]["endpoints"][0]["lb_endpoints"])
    for limit in ("max_connections", "max_pending_requests", "max_requests"):
        assert thresholds[limit] >= gateways * DEFAULTS.max_in_flight


def test_clients_without_a_key_cannot_fill_the_memory() -> None:
    """The gateway checks keys. Until then Envoy holds a buffer of each connection, and no body."""
    found = settings()
    manager, overload = manager_of(found), found["overload_manager"]
    assert [one["name"] for one in manager["http_filters"]] == ["envoy.filters.http.router"]
    (listener,) = found["static_resources"]["listeners"]
    upstream_bytes = cluster_of(found)["per_connection_buffer_limit_bytes"]
    window_bytes = manager["http2_protocol_options"]["initial_connection_window_size"]
    downstream_bytes = max(listener["per_connection_buffer_limit_bytes"], window_bytes)
    monitors = {one["name"].rpartition(".")[2]: one for one in overload["resource_monitors"]}
    heap_bytes = monitors["fixed_heap"]["typed_config"]["max_heap_size_bytes"]
    connections = monitors["global_downstream_max_connections"]["typed_config"]
    most = connections["max_active_downstream_connections"]
    assert most * (downstream_bytes + upstream_bytes) < 0.8 * heap_bytes
    assert most >= cluster_of(found)["circuit_breakers"]["thresholds"][0]["max_connections"]


def test_envoy_sheds_load_before_its_heap_is_full() -> None:
    actions = {
        one["name"].rpartition(".")[2]: one["triggers"]
        for one in settings()["overload_manager"]["actions"]
    }
    for name in ("stop_accepting_connections", "stop_accepting_requests"):
        (trigger,) = actions[name]
        assert trigger["name"] == "envoy.resource_monitors.fixed_heap"
        assert 0.5 < trigger["threshold"]["value"] < 1
    (resets,) = actions["reset_high_memory_stream"]
    assert resets["scaled"]["scaling_threshold"] < resets["scaled"]["saturation_threshold"] < 1


def test_clients_cannot_choose_retries() -> None:
    manager = manager_of(settings())
    assert manager["use_remote_address"] is True
    assert manager["internal_address_config"]["cidr_ranges"]
