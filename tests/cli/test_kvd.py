from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.runner import run
from tests.kvd.hosts import kvd_process


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--memory", "lots"), "--memory: 'lots' is not a size"),
        (("--listen", "nowhere"), "--listen: 'nowhere' is not an address"),
        (("--tls-ca", "ca.pem"), "mutual TLS needs all three"),
        (("--set", "kvd.tls.client_cert=c.pem"), "only one of the two is set"),
        (("--set", "kvd.timeouts.grant_s=0"), "kvd.timeouts.grant_s: expected `float` > 0"),
        (("--set", "kvd.grant_s=9"), "kvd.grant_s: unknown key"),
        (("--set", "kvd.memory"), "--set: 'kvd.memory' is not KEY=VALUE"),
        (("--member-key-file", "no-such-file"), "no-such-file: no such file"),
        (("--set", "kvd.via=relay"), "kvd.via: 'relay' is not an address"),
        (("--gateway", "http://gw"), "--gateway: a cluster is required"),
        (("--insecure", "--listen", "192.0.2.1:1"), "--listen: 192.0.2.1:1: Cannot assign"),
        (("--insecure", "--http", "192.0.2.1:1"), "--http: 192.0.2.1:1: "),
        (("--set", 'kvd.peers=["a b"]'), "kvd.peers: 'a b' is not a host name"),
        (("--otlp-endpoint", "localhost:4318"), "--otlp-endpoint: 'localhost:4318' is not a URL"),
    ],
)
def test_mistakes_are_one_line(
    arguments: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = run(capsys, monkeypatch, "kvd", "--socket", tmp_path / "s", *arguments)
    assert result.code == 2
    assert problem in result.err and result.err.count("\n") == 1


def test_the_socket_is_required_as_a_flag_or_in_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(capsys, monkeypatch, "kvd")
    assert result.code == 2 and "--socket: is required" in result.err
    file = tmp_path / "host.toml"
    file.write_text('[kvd]\nsocket = "no/where"\n')
    result = run(capsys, monkeypatch, "kvd", "--config", file)
    assert f"{tmp_path / 'no' / 'where'}: --socket: cannot listen" in result.err


def test_a_mistake_in_the_file_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "host.toml"
    file.write_text("[kvd]\ngrants_s = 3\n[node]\n")
    result = run(capsys, monkeypatch, "kvd", "--config", file)
    assert result.code == 2 and f"{file}: kvd.grants_s: unknown key" in result.err


def test_a_socket_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(capsys, monkeypatch, "kvd", "--socket", tmp_path / "no" / "where")
    assert result.code == 2 and "--socket: cannot listen" in result.err


def test_ends_cleanly_and_leaves_no_socket(tmp_path: Path) -> None:
    with kvd_process(tmp_path) as host, host.engine() as engine:
        assert engine.registered.http_url == host.url
        assert engine.registered.data_address == host.data
        assert host.end(signal.SIGTERM) == 0
        assert not host.socket.exists()
    assert "Traceback" not in (tmp_path / "kvd.log").read_text()
