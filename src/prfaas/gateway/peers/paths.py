"""The paths for other gateways and for orders of operators: report, drain."""

from __future__ import annotations

import re

import msgspec
from aiohttp import web

from prfaas.contracts.gateway_api import DRAIN_PATH, MAX_COUNT, REPORT_PATH, SetDrain
from prfaas.errors import InputError, RequestError
from prfaas.gateway.api.body_limits import INLINE_BODY_BYTES, BodyReader
from prfaas.gateway.api.content_encoding import too_large
from prfaas.gateway.request import Backend

_NUMBER = re.compile(r"[0-9]{1,13}", re.ASCII)


class DeploymentPaths:
    def __init__(self, backend: Backend, body_reader: BodyReader) -> None:
        self._backend = backend
        self._body_reader = body_reader

    def add_to(self, app: web.Application) -> None:
        app.router.add_get(REPORT_PATH, self._report)
        app.router.add_post(DRAIN_PATH, self._drain)

    async def _report(self, request: web.Request) -> web.Response:
        after = request.query.get("after", "0")
        if not _NUMBER.fullmatch(after) or int(after) > MAX_COUNT:
            raise InputError(
                "is not the number of a request",
                where="after",
                fix=f"send an integer from 0 to {MAX_COUNT}, or leave it out",
            )
        report = self._backend.gateway_report(int(after))
        if report is None:
            raise RequestError(
                404,
                "no_other_gateways",
                "this gateway has no report, because its deployment file has no [[gateways]]; give "
                "every gateway of the deployment the same file",
            )
        return web.Response(body=msgspec.json.encode(report), content_type="application/json")

    async def _drain(self, request: web.Request) -> web.Response:
        async with self._body_reader.read(request) as body:
            if body.data is None:
                raise too_large(INLINE_BODY_BYTES)
            try:
                order = msgspec.json.decode(body.data, type=SetDrain)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                raise InputError(
                    f"the body is not an order: {error}",
                    fix='send {"cluster": "NAME", "drained": true}',
                ) from None
        answer = await self._backend.drain(order.cluster, order.drained)
        return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
