from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prfaas.security.tls import client_context, server_context
from tests.cli.runner import Result

Run = Callable[..., Result]


def test_writes_a_set_that_works_and_says_what_it_wrote(prfaas: Run, tmp_path: Path) -> None:
    folder = tmp_path / "certs"
    result = prfaas("certs", folder, "--host", "kv1.example.net", "--days", 30)
    assert result.code == 0
    for name in ("ca.pem", "ca.key", "server.pem", "server.key", "client.pem", "client.key"):
        assert str(folder / name) in result.out
    assert "kv1.example.net" in result.out
    assert "valid for 30 days, until 20" in result.out
    server_context(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    client_context(folder / "ca.pem", folder / "client.pem", folder / "client.key")


def test_mistakes_are_one_line(prfaas: Run, tmp_path: Path) -> None:
    assert prfaas("certs", tmp_path).code == 0
    for arguments, expected in (
        ((tmp_path,), "exist already; use --force"),
        ((tmp_path / "b", "--host", "kv1:80"), "'kv1:80' is not a host name or IP address"),
        ((tmp_path / "b", "--days", 0), "--days: 0 days; give 1 to 3650"),
    ):
        result = prfaas("certs", *arguments)
        assert result.code == 2
        assert result.err.startswith("error: ") and expected in result.err
        assert result.err.count("\n") == 1
    assert prfaas("certs", tmp_path, "--force").code == 0
