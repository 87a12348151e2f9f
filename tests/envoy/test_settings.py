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
    (buffering, router) = manager["http_filters"]
    assert buffering["typed_config"]["max_request_bytes"] == DEFAULTS.max_body_mb * 10**6
    assert seconds(manager["request_timeout"]) <= TIMEOUTS.body_s
    (thresholds,) = cluster_of(found)["circuit_breakers"]["thresholds"]
    gateways = len(cluster_of(found)["load_assignment"]["endpoints"][0]["lb_endpoints"])
    for limit in ("max_connections", "max_pending_requests", "max_requests"):
        assert thresholds[limit] >= gateways * DEFAULTS.max_in_flight


def test_clients_cannot_choose_retries() -> None:
    manager = manager_of(settings())
    assert manager["use_remote_address"] is True
    assert manager["internal_address_config"]["cidr_ranges"]
