"""Headers with which the gateway tells proxies and clients what to do after an error."""

from __future__ import annotations

import pytest

from prfaas.errors import RequestError
from prfaas.gateway.api.error_responses import error_response


@pytest.mark.parametrize(
    ("status", "code", "retried"),
    [
        (400, "invalid_request", True),  # no proxy retries it anyway
        (429, "tenant_limit", False),
        (500, "internal_error", False),
        (502, "engine_lost", False),
        (503, "overloaded", False),
        (503, "body_worker_lost", False),
        (503, "shutting_down", True),
    ],
)
def test_proxies_retry_only_what_another_gateway_can_serve(
    status: int, code: str, retried: bool
) -> None:
    response = error_response(RequestError(status, code, "why", retry_after_s=0.2))
    assert ("X-Envoy-RateLimited" not in response.headers) is retried
    assert response.headers["Retry-After"] == "1"
