from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prfaas.measure.path_check import MOST_BYTES
from prfaas.security.tls import server_context
from prfaas.transport.listener import Listener, ListenerOptions
from prfaas_lab.testing.certificates import make_certificates
from tests.cli.runner import Result

Run = Callable[..., Result]


def test_a_table(prfaas: Run) -> None:
    with Listener() as listener:
        where = f"127.0.0.1:{listener.address[1]}"
        shown = prfaas("doctor", where, "--connections", "1", "--seconds", "0.1")
        assert shown.code == 0
        assert "path, in the clear" in shown.out and "round trip" in shown.out
        assert "this host alone, in the clear" in shown.out
        assert "this host alone, with mutual TLS" in shown.out
        assert "limit: " in shown.out
    gone = prfaas("doctor", where)
    assert gone.code == 1
    assert "No process listens on that port" in gone.out


def test_json_of_a_path_with_tls(prfaas: Run, tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    server = server_context(made.ca, made.server, made.server_key)
    with Listener(tls=lambda: server) as listener:
        tls = ("--tls-ca", made.ca, "--tls-cert", made.client, "--tls-key", made.client_key)
        numbers = ("--connections", "2", "--seconds", "0.1")
        where = f"127.0.0.1:{listener.address[1]}"
        found = prfaas("doctor", where, *tls, *numbers, "--json", "--path-only").json
    assert found["healthy"] and found["rates"][0]["connections"] == 2
    assert found["tls"].startswith("TLSv1.3")
    assert found["host"] is None and found["limit"]["limit"] == "unclear"
    assert found["advice"][: len(found["limit"]["advice"])] == found["limit"]["advice"]


def test_help_names_the_limits(prfaas: Run) -> None:
    shown = prfaas("doctor", "path", "--help")
    assert shown.code == 0
    for limit in ("link ", "round trip ", "cores ", "TLS ", "unclear "):
        assert f"\n    {limit}" in shown.out, limit
    assert f"at most {MOST_BYTES >> 20} MiB" in shown.out
    per_minute = ListenerOptions().measure_bytes_per_minute
    assert f"{per_minute >> 30} GiB per minute" in " ".join(shown.out.split())
    assert 2 * MOST_BYTES < per_minute


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
