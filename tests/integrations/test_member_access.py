"""The middleware of vLLM servers: keys that change, and a server that leaves."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import InputError
from prfaas.integrations.vllm import member_access
from prfaas.integrations.vllm.member_access import MemberAccess
from prfaas_lab.testing import FakeClock
from tests.secret_files import write_secret

OLD, NEW, METRICS = "o" * 32, "n" * 32, "m" * 32


async def serve(scope: Any, receive: Any, send: Any) -> None:
    """The server behind the middleware."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


@pytest.fixture
def keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_secret(tmp_path / "member.key", f"{OLD}\n")
    write_secret(tmp_path / "metrics.key", f"{METRICS}\n")
    (tmp_path / "leaving").touch()  # of an earlier server
    monkeypatch.setenv(member_access.MEMBER_KEY_FILE, str(tmp_path / "member.key"))
    monkeypatch.setenv(member_access.METRICS_KEY_FILE, str(tmp_path / "metrics.key"))
    monkeypatch.setenv(member_access.LEAVING_FILE, str(tmp_path / "leaving"))
    return tmp_path


def status(access: MemberAccess, path: str, key: str = "") -> int:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read")

    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    scope = {"type": "http", "path": path, "headers": headers}
    asyncio.run(access(scope, receive, send))
    if sent[0]["status"] == 503:
        assert b'"code":"draining"' in sent[1]["body"]
    found: int = sent[0]["status"]
    return found


def test_each_key_opens_its_paths(keys: Path) -> None:
    access = MemberAccess(serve)
    assert status(access, "/health") == 200
    for path in ("/v1/completions", "/metrics", "/v1/models", "/tokenize"):
        assert status(access, path) == 401
        assert status(access, path, OLD) == 200
        assert status(access, path, METRICS) == (200 if path == "/metrics" else 401)
        assert status(access, path, "x") == 401


def test_keys_are_replaced_while_the_server_runs(keys: Path) -> None:
    clock = FakeClock()
    access = MemberAccess(serve, clock)
    file = keys / "member.key"
    for lines, old, new in (([OLD, NEW], 200, 200), ([NEW], 401, 200), ([], 401, 200)):
        file.write_text("".join(f"{line}\n" for line in lines))
        clock.advance(member_access.POLL_S)
        assert status(access, "/v1/models", OLD) == old
        assert status(access, "/v1/models", NEW) == new


def test_a_server_that_leaves_says_so_and_serves_on(keys: Path) -> None:
    access = MemberAccess(serve)
    assert status(access, "/health") == 200  # the file of the earlier server counts no more
    (keys / "leaving").touch()
    assert status(access, "/health") == 503
    assert status(access, "/v1/completions", OLD) == 200


def test_a_server_without_a_key_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(member_access.MEMBER_KEY_FILE, raising=False)
    with pytest.raises(InputError, match="PRFAAS_MEMBER_KEY_FILE: is not set"):
        MemberAccess(serve)
