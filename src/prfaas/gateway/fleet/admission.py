"""Which kvds may join the fleet: those that prove that they have the member key.

The gateway sends the member key, prompts and salts to members. Before the first of these requests
the kvd at a registered URL answers a challenge, which reveals nothing. Members of the deployment
file are approved by the operator and prove nothing.
"""

from __future__ import annotations

from urllib.parse import urlsplit

import msgspec

from prfaas.contracts.kvd_api import ProofOfMembership, ProveMembership
from prfaas.errors import PeerError, RequestError
from prfaas.http_client.client import HttpClient
from prfaas.security.exposure import is_loopback
from prfaas.security.shared_key import SharedKey, new_challenge

_PROOF_BYTES = 4096  # of a response
MAX_PROOFS = 32  # under way at the same time


class Admission:
    def __init__(
        self, key: SharedKey | None, http: HttpClient, timeout_s: float, *, has_tls: bool
    ) -> None:
        """`http` sends no key. Without a key every URL is approved: the API then lets kvds register
        with `--insecure` only. A gateway that `has_tls` sends the key to other hosts over TLS."""
        self._has_tls = has_tls
        self._key = key
        self._http = http
        self._timeout_s = timeout_s
        self._under_way: set[str] = set()

    async def approve(self, kvd_url: str) -> None:
        """Returns when the kvd at this URL (`parse_peer_url`) has proved its membership. Raises
        RequestError."""
        if self._key is None:
            return
        parts = urlsplit(kvd_url)
        if self._has_tls and parts.scheme != "https" and not is_loopback(parts.hostname or ""):
            raise RequestError(
                403,
                "not_a_member",
                f"the member key would be sent to {kvd_url} in the clear; give the kvd "
                "certificates, or list the node in the deployment file",
                param="kvd_url",
            )
        if kvd_url in self._under_way or len(self._under_way) >= MAX_PROOFS:
            raise RequestError(
                503, "busy", "another registration is under way", retry_after_s=self._timeout_s
            )
        self._under_way.add(kvd_url)
        try:
            await self._challenge(self._key, kvd_url)
        finally:
            self._under_way.discard(kvd_url)

    async def _challenge(self, key: SharedKey, kvd_url: str) -> None:
        challenge = new_challenge()
        try:
            answer = await self._http.request_json(
                "POST",
                f"{kvd_url}/v1/prove",
                ProofOfMembership,
                timeout_s=self._timeout_s,
                body=msgspec.json.encode(ProveMembership(challenge)),
                max_bytes=_PROOF_BYTES,
            )
        except PeerError:
            # The reason stays here: it could describe a service that the caller cannot reach.
            raise RequestError(
                403, "not_a_member", f"{kvd_url} did not answer the challenge", param="kvd_url"
            ) from None
        if not key.verifies(answer.proofs, challenge, kvd_url):
            raise RequestError(
                403,
                "not_a_member",
                f"{kvd_url} does not have the member key, or has another URL itself",
                param="kvd_url",
            )
