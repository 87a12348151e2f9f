"""Requests that have cost two nodes, and are refused for a while. Pure.

They are known by a digest of what engines get to see of them. A client that repeats a refused
request, as many libraries do on their own, would otherwise take two more nodes each time.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Final

from prfaas.clock import Clock
from prfaas.gateway.client.request_body import encode_body
from prfaas.gateway.request import GatewayRequest
from prfaas.http_client.paced_writer import body_bytes

KEPT_OUT_S: Final = 300.0
MOST_KEPT_OUT: Final = 1_024


class KeptOut:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # By digest: until when. All are kept out equally long, so the oldest ends first.
        self._until_s: OrderedDict[bytes, float] = OrderedDict()

    def __len__(self) -> int:
        now_s = self._clock.now()
        while self._until_s and next(iter(self._until_s.values())) <= now_s:
            self._until_s.popitem(last=False)
        return len(self._until_s)

    def add(self, digest: bytes) -> None:
        self._until_s[digest] = self._clock.now() + KEPT_OUT_S
        self._until_s.move_to_end(digest)
        if len(self._until_s) > MOST_KEPT_OUT:
            self._until_s.popitem(last=False)

    def left_s(self, digest: bytes) -> float:
        """How long the request is refused from now on; 0: it is not."""
        return max(0.0, self._until_s.get(digest, 0.0) - self._clock.now())


def hashed_bytes(request: GatewayRequest) -> int:
    """How much `digest_of` reads."""
    return request.token_ids.array.nbytes + body_bytes(encode_body(request.fields))


def digest_of(request: GatewayRequest) -> bytes:
    """Of the prompt and all parameters, and of the tenant: no tenant can keep another one's
    requests out."""
    digest = hashlib.sha256()
    for text in (request.path, request.tenant, request.salt):
        data = text.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    digest.update(len(request.token_ids).to_bytes(8, "big"))
    digest.update(request.token_ids.array.data)
    body = encode_body(request.fields)
    for part in (body,) if isinstance(body, bytes) else body:
        digest.update(part)
    return digest.digest()
