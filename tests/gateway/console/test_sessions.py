"""Sessions of the console begin with the operator key, and end."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.gateway.console.sessions import (
    LIFETIME_S,
    MOST_FAILURES,
    MOST_FAILURES_OF_ALL,
    MOST_SESSIONS,
    WINDOW_S,
    Sessions,
    TooManyFailures,
)
from prfaas.security.shared_key import SharedKey
from tests.secret_files import write_secret

KEY, OTHER = "k" * 32, "o" * 32


def logged_in(sessions: Sessions, now_s: float = 0.0, key: str = KEY) -> str:
    token = sessions.log_in(key, "me", now_s)
    assert token is not None
    return token


def test_only_the_operator_key_opens_a_session() -> None:
    sessions = Sessions(SharedKey([KEY]))
    assert sessions.log_in(KEY[:-1], "me", 0.0) is None and sessions.log_in("", "me", 0.0) is None
    one, two = logged_in(sessions), logged_in(sessions)
    assert one != two and len(one) >= 40
    for token, opens in ((one, True), (two, True), (one[:-1], False), ("", False), (KEY, False)):
        assert sessions.is_open(token, 1.0) is opens


def test_a_session_ends_with_its_time_and_at_the_logout() -> None:
    sessions = Sessions(SharedKey([KEY]))
    first, second = logged_in(sessions, 0.0), logged_in(sessions, 10.0)
    sessions.log_out(second)
    sessions.log_out("unknown")
    assert not sessions.is_open(second, 10.0)
    assert sessions.is_open(first, LIFETIME_S - 1) and not sessions.is_open(first, LIFETIME_S)
    assert len(sessions) == 0


def test_a_further_login_ends_the_oldest_session() -> None:
    sessions = Sessions(SharedKey([KEY]))
    tokens = [logged_in(sessions, float(number)) for number in range(MOST_SESSIONS + 3)]
    assert len(sessions) == MOST_SESSIONS
    assert [sessions.is_open(token, 100.0) for token in tokens[:4]] == [False, False, False, True]


def test_a_session_ends_when_its_key_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "operator.key"
    write_secret(file, f"{KEY}\n{OTHER}\n")
    key = SharedKey.read(file)
    sessions = Sessions(key)
    old, new = logged_in(sessions, key=KEY), logged_in(sessions, key=OTHER)
    file.write_text(f"{OTHER}\n")
    key.reload()
    assert not sessions.is_open(old, 1.0) and sessions.is_open(new, 1.0)


def test_failed_logins_are_limited_by_address() -> None:
    sessions = Sessions(SharedKey([KEY]))
    for _ in range(MOST_FAILURES):
        assert sessions.log_in("wrong", "attacker", 0.0) is None
    with pytest.raises(TooManyFailures) as refused:
        sessions.log_in("wrong", "attacker", 1.0)
    assert refused.value.status == 429 and refused.value.retry_after_s == WINDOW_S - 1
    assert sessions.log_in("wrong", "somebody else", 1.0) is None
    assert sessions.log_in("wrong", "attacker", WINDOW_S + 1) is None


def test_failed_logins_never_lock_the_right_key_out() -> None:
    """An attacker may share the operator's address: a proxy, a jump host, a browser's machine."""
    sessions = Sessions(SharedKey([KEY]))
    for number in range(MOST_FAILURES_OF_ALL):
        sessions.log_in("wrong", f"address {number // MOST_FAILURES}", 0.0)
    for address in ("address 0", "another one"):
        with pytest.raises(TooManyFailures):
            sessions.log_in("wrong", address, 1.0)
        assert sessions.is_open(logged_in(sessions, 1.0), 1.0)
        token = sessions.log_in(KEY, address, 1.0)
        assert token is not None and sessions.is_open(token, 1.0)


def test_failed_logins_are_limited_in_all() -> None:
    sessions = Sessions(SharedKey([KEY]))
    for number in range(MOST_FAILURES_OF_ALL):
        assert sessions.log_in("wrong", f"address {number}", 0.0) is None
    with pytest.raises(TooManyFailures):
        sessions.log_in("wrong", "yet another", 1.0)
    assert len(sessions._failed._all) == MOST_FAILURES_OF_ALL, "what is remembered is bounded"
    assert sessions.log_in("wrong", "yet another", WINDOW_S) is None


def test_without_an_operator_key_no_key_opens_a_session() -> None:
    assert Sessions(None).log_in("", "me", 0.0) is None
