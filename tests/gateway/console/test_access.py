"""Cookies of sessions."""

from __future__ import annotations

from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from prfaas.gateway.api.credentials import GatewayCredentials
from prfaas.gateway.console.access import ConsoleAccess
from prfaas.security.shared_key import SharedKey
from prfaas_lab.testing.clock import FakeClock

KEY = "k" * 32


def access(*, tls: bool) -> ConsoleAccess:
    credentials = GatewayCredentials(operator=SharedKey([KEY]))
    return ConsoleAccess(credentials, FakeClock(), "gateway.example", 8443, tls=tls)


def test_with_tls_the_cookie_is_only_sent_over_tls_and_to_this_host() -> None:
    made = access(tls=True)
    token = made.log_in(make_mocked_request("POST", "/console/login"), KEY)
    assert token is not None
    response = web.Response()
    made.set_cookie(response, token)
    cookie = response.cookies.output(header="")
    assert cookie.startswith(f" __Host-prfaas_console_8443={token};")
    for attribute in ("HttpOnly", "Secure", "SameSite=Strict", "Path=/", "Max-Age=43200"):
        assert attribute in cookie
    assert "Domain" not in cookie
    sent = make_mocked_request("GET", "/", {"Cookie": f"__Host-prfaas_console_8443={token}"})
    assert made.is_logged_in(sent)


def test_a_cookie_of_another_gateway_on_the_host_is_not_looked_at() -> None:
    made = access(tls=False)
    token = made.log_in(make_mocked_request("POST", "/console/login"), KEY)
    for name, opens in (("prfaas_console_8443", True), ("prfaas_console_8080", False)):
        sent = make_mocked_request("GET", "/", {"Cookie": f"{name}={token}"})
        assert made.is_logged_in(sent) is opens
