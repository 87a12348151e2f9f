from __future__ import annotations

from collections.abc import Callable

import pytest

from prfaas.transport.listener import Listener
from tests.cli.runner import Result

Run = Callable[..., Result]


def test_a_table_and_json(prfaas: Run) -> None:
    with Listener() as listener:
        where = f"127.0.0.1:{listener.address[1]}"
        shown = prfaas("doctor", where, "--connections", "1", "--seconds", "0.1")
        assert shown.code == 0
        assert "rate with 1 connections" in shown.out and "round trip" in shown.out
        found = prfaas("doctor", where, "--connections", "2", "--seconds", "0.1", "--json").json
        assert found["healthy"] and found["rates"][0]["connections"] == 2
    gone = prfaas("doctor", where)
    assert gone.code == 1
    assert "no process listens on that port" in gone.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nowhere",), "'nowhere' is not an address"),
        (("h:1", "--tls-ca", "x"), "mutual TLS needs all three"),
        (("h:1", "--seconds", "0"), "--seconds: 0 is out of range"),
        (("h:1", "--connections", "one"), "--connections: 'one'"),
        (("h:1", "--connections", "0"), "--connections: '0'"),
        (("h:1", "--tls-ca", "a", "--tls-cert", "b", "--tls-key", "c"), "no such file"),
    ],
)
def test_bad_flags(prfaas: Run, arguments: tuple[str, ...], message: str) -> None:
    result = prfaas("doctor", *arguments)
    assert result.code == 2
    assert message in result.err
