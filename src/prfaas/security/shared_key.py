"""Keys that services share: operator key, metrics key and member key (docs/security.md).

A key travels as an HTTP bearer token and is compared in constant time. A key file has one key per
line: the first one is sent, every one is accepted. An operator replaces a key without an
interruption in three steps: add the new key as the second line, make it the first line, remove the
old line; after each step every process reads its file again (SIGHUP).
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from prfaas.security.secret_file import read_secrets

MIN_CHARACTERS = 16  # a shorter key can be guessed
_PROOF = "prfaas proof of membership"


class SharedKey:
    """One key, or several while it is being replaced. `reload` reads its file again."""

    def __init__(self, keys: Sequence[str], file: Path | None = None) -> None:
        self._file = file
        self.use(keys)

    @classmethod
    def read(cls, file: Path) -> SharedKey:
        return cls(read_secrets(file, min_characters=MIN_CHARACTERS), file)

    def use(self, keys: Sequence[str]) -> None:
        """From now on these are the keys; the first one is sent."""
        self._keys = tuple(keys)
        self._digests = [digest(key) for key in keys]
        self.header = f"Authorization: Bearer {keys[0]}\r\n"  # of a request that sends the key

    @property
    def sent(self) -> str:
        """The key that this process sends."""
        return self._keys[0]

    def files(self) -> Sequence[Path]:
        return () if self._file is None else (self._file,)

    def reload(self) -> None:
        """Raises InputError, and keeps its keys, when the file does not hold a key."""
        self.use(self.read_again())

    def read_again(self) -> Sequence[str]:
        """The keys that the file has now, which are not used yet. Raises InputError."""
        if self._file is None:
            return self._keys
        return read_secrets(self._file, min_characters=MIN_CHARACTERS)

    def accepts(self, authorization: str | None) -> bool:
        """Whether this `Authorization` header has one of the keys."""
        offered = bearer_token(authorization)
        if offered is None:
            return False
        return self.recognise(offered) is not None

    def recognise(self, offered: str) -> bytes | None:
        """The digest of the key that equals `offered`; None: no key does."""
        found = digest(offered)
        return found if self.has_digest(found) else None

    def has_digest(self, found: bytes) -> bool:
        """Whether one of the keys has this digest."""
        # Each key is compared, in constant time: the time of a response reveals nothing.
        equal = [hmac.compare_digest(known, found) for known in self._digests]
        return any(equal)

    def prove(self, challenge: str, url: str) -> list[str]:
        """Proofs that the process at `url` has the key, which do not reveal it: one for each key,
        because the verifier may not have the newest yet."""
        return [_proof(key, challenge, url) for key in self._keys]

    def verifies(self, proofs: Iterable[str], challenge: str, url: str) -> bool:
        expected = [_proof(key, challenge, url) for key in self._keys]
        equal = [
            hmac.compare_digest(known.encode(), proof.encode("utf-8", "surrogatepass"))
            for known in expected
            for proof in proofs
        ]
        return any(equal)

    def __repr__(self) -> str:
        return f"SharedKey({len(self._keys)} keys)"


def new_challenge() -> str:
    return secrets.token_hex(16)


def bearer_token(authorization: str | None) -> str | None:
    """The token of an `Authorization: Bearer TOKEN` header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() or None if scheme.lower() == "bearer" else None


def bearer(key: str | None) -> dict[str, str]:
    """The headers of a request that sends this key."""
    return {} if key is None else {"Authorization": f"Bearer {key}"}


def digest(secret: str) -> bytes:
    """Digests have equal length. A header may contain bytes that are not UTF-8."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


def require_key(
    refuse: Callable[[], web.StreamResponse],
    member: SharedKey,
    metrics: SharedKey | None,
    open_paths: frozenset[str],
) -> Middleware:
    """A middleware that returns `refuse()` for a request without the member key. The key
    `metrics` opens /metrics."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization")
        if request.path in open_paths or member.accepts(given):
            return await handler(request)
        if request.path == "/metrics" and metrics is not None and metrics.accepts(given):
            return await handler(request)
        return refuse()

    return check


def _proof(key: str, challenge: str, url: str) -> str:
    # The URL is part of the proof: a process cannot use the answer that another member gave.
    message = json.dumps([_PROOF, challenge, url]).encode()
    return hmac.new(key.encode(), message, "sha256").hexdigest()
