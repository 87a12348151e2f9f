from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.runner import run
from tests.kvd.hosts import kvd_process


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--memory", "lots"), "--memory: 'lots' is no size"),
        (("--listen", "nowhere"), "--listen: 'nowhere' is no address"),
        (("--ca", "ca.pem"), "mutual TLS needs all three"),
        (("--client-cert", "c.pem"), "one without the other"),
        (("--grant-s", "0"), "--grant-s: 0 s; give more than 0"),
        (("--key-file", "no-such-file"), "no-such-file: no such file"),
        (("--via", "relay"), "--via: 'relay' is no address"),
        (("--listen", "192.0.2.1:1"), "--listen: 192.0.2.1:1: Cannot assign"),
        (("--http", "192.0.2.1:1"), "--http: 192.0.2.1:1: "),
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
