"""Sessions of the console: a login with the operator key gives a random token. Pure.

Event streams of browsers cannot send a key, so a cookie has the token. A session ends after
`LIFETIME_S`, at the logout, or when its operator key is not accepted any more. Sessions, and what
is remembered of failed logins, are bounded. Tokens are kept as digests.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from typing import NamedTuple

from prfaas.errors import RequestError
from prfaas.security.shared_key import SharedKey, digest

LIFETIME_S = 12 * 3600.0
MOST_SESSIONS = 64  # a further login ends the oldest
TOKEN_BYTES = 32
# Failed logins in a minute, of one address and of all together. A key has 16 characters or more, so
# that this is not what keeps a guess from succeeding; it bounds the log.
WINDOW_S = 60.0
MOST_FAILURES = 10
MOST_FAILURES_OF_ALL = 100


class TooManyFailures(RequestError):
    def __init__(self, retry_after_s: float) -> None:
        super().__init__(
            429,
            "too_many_logins",
            "too many logins have failed; try again in a minute",
            retry_after_s=retry_after_s,
        )


class _Session(NamedTuple):
    key: bytes  # digest of the operator key that opened it
    until_s: float


class FailedLogins:
    """The failures of the last minute."""

    def __init__(self) -> None:
        self._all: deque[tuple[float, str]] = deque()  # time and address, at most the limit of all

    def check(self, address: str, now_s: float) -> None:
        """Raises `TooManyFailures` when a further failure of the address is one too many."""
        while self._all and self._all[0][0] <= now_s - WINDOW_S:
            self._all.popleft()
        own = [at_s for at_s, failed in self._all if failed == address]
        if len(own) >= MOST_FAILURES:
            raise TooManyFailures(own[0] + WINDOW_S - now_s)
        if len(self._all) >= MOST_FAILURES_OF_ALL:
            raise TooManyFailures(self._all[0][0] + WINDOW_S - now_s)

    def record(self, address: str, now_s: float) -> None:
        self._all.append((now_s, address))


class Sessions:
    def __init__(self, operator: SharedKey | None) -> None:
        """`operator` is reloaded by its owner. None: there is no login."""
        self._operator = operator
        self._sessions: OrderedDict[bytes, _Session] = OrderedDict()  # by digest of the token
        self._failed = FailedLogins()

    def __len__(self) -> int:
        return len(self._sessions)

    def log_in(self, key: str, address: str, now_s: float) -> str | None:
        """The token of a new session; None: the key is not the operator key. Raises
        `TooManyFailures` for a wrong key after too many others: the right one always opens a
        session, or whoever shares an address with the operator could lock them out."""
        found = None if self._operator is None else self._operator.recognise(key)
        if found is None:
            self._failed.check(address, now_s)
            self._failed.record(address, now_s)
            return None
        self._drop_ended(now_s)
        while len(self._sessions) >= MOST_SESSIONS:
            self._sessions.popitem(last=False)
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._sessions[digest(token)] = _Session(found, now_s + LIFETIME_S)
        return token

    def log_out(self, token: str) -> None:
        self._sessions.pop(digest(token), None)

    def is_open(self, token: str, now_s: float) -> bool:
        """Whether the token is that of a session which has not ended."""
        # The digest is looked up, and not the token: the time of the look-up tells nothing of it.
        name = digest(token)
        session = self._sessions.get(name)
        if session is None:
            return False
        if self._has_ended(session, now_s):
            del self._sessions[name]
            return False
        return True

    def _has_ended(self, session: _Session, now_s: float) -> bool:
        accepted = self._operator is not None and self._operator.has_digest(session.key)
        return not accepted or now_s >= session.until_s

    def _drop_ended(self, now_s: float) -> None:
        ended = [name for name, found in self._sessions.items() if self._has_ended(found, now_s)]
        for name in ended:
            del self._sessions[name]
