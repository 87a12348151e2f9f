"""The paths /tokenize and /detokenize, served by the gateway's own tokenizer.

A request counts for its tenant like a completion: its bytes, its share of the token rate, and as a
request in flight. It runs in a thread, when it is its tenant's turn. Parsing holds the interpreter,
so a body is short.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
from aiohttp import web

from prfaas.gateway.api.body_limits import BodyReader
from prfaas.gateway.api.content_encoding import too_large
from prfaas.gateway.api.prompts import Prompts
from prfaas.gateway.api.response_stream import send_json
from prfaas.gateway.api.tenants import admit
from prfaas.gateway.tenants import Tenants

TOKENIZE_PATHS = ("/tokenize", "/detokenize")
MAX_BYTES = 1 << 18  # some sixty thousand tokens of text


class TokenizationApi:
    def __init__(
        self, prompts: Prompts, body_reader: BodyReader, tenants: Tenants, stall_s: float
    ) -> None:
        self._prompts = prompts
        self._body_reader = body_reader
        self._tenants = tenants
        self._stall_s = stall_s  # as of `ResponseStream`

    async def answer(self, request: web.Request, tenant: str) -> web.StreamResponse:
        preparer = self._prompts.preparer
        work = preparer.tokenize if request.path == "/tokenize" else preparer.detokenize
        with admit(self._tenants, tenant) as admitted:
            admitted.check_body(request.content_length or 0)
            async with self._body_reader.read(
                request, admitted.add_bytes, admitted.count_read, inline_bytes=MAX_BYTES
            ) as body:
                if body.data is None:
                    raise too_large(MAX_BYTES)
                encoded = await self._prompts.run(tenant, partial(_encoded, work, body.data))
            response, _ = await send_json(request, encoded, self._stall_s)
            return response


def _encoded(work: Callable[[bytes], object], data: bytes) -> bytes:
    return msgspec.json.encode(work(data))
