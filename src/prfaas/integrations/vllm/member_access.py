"""Access to a vLLM server of a deployment, as ASGI middleware:

    vllm serve ... --middleware prfaas.integrations.vllm.member_access.MemberAccess

vLLM's own key comes from the environment and cannot be replaced while the server runs. This checks
the keys of files, which are read again where they have changed. It also answers /health while the
server is about to stop, as `prfaas node` does, so that gateways send it no new requests. vLLM takes
no arguments for middleware, so the files are named in the environment.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from prfaas.clock import Clock, MonotonicClock
from prfaas.errors import InputError
from prfaas.security.reload import FileWatch, reload_all
from prfaas.security.shared_key import SharedKey

_LOG = logging.getLogger(__name__)

MEMBER_KEY_FILE = "PRFAAS_MEMBER_KEY_FILE"
METRICS_KEY_FILE = "PRFAAS_METRICS_KEY_FILE"
LEAVING_FILE = "PRFAAS_LEAVING_FILE"
POLL_S = 5.0  # between two looks at the files
_HEALTH, _METRICS = "/health", "/metrics"

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class MemberAccess:
    """The member key opens every path, the metrics key /metrics. /health needs no key: over mutual
    TLS its caller has a certificate of the deployment."""

    def __init__(self, app: Application, clock: Clock | None = None) -> None:
        self._app = app
        self._clock = clock or MonotonicClock()
        self._member = _required(MEMBER_KEY_FILE)
        metrics = os.environ.get(METRICS_KEY_FILE)
        self._metrics = SharedKey.read(Path(metrics)) if metrics else None
        leaving = os.environ.get(LEAVING_FILE)
        self._leaving = Path(leaving) if leaving else None
        if self._leaving is not None:
            # Of a server of this pod that was stopped, and started again.
            self._leaving.unlink(missing_ok=True)
        self._keys = [key for key in (self._member, self._metrics) if key is not None]
        self._watch = FileWatch(self._keys)
        self._looked_s = self._clock.now()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        self._look()
        path = scope.get("path", "")
        if path == _HEALTH:
            if self._leaving is not None and self._leaving.exists():
                await _refuse(send, 503, "draining", "this server is shutting down")
                return
        elif not self._admits(path, scope.get("headers", ())):
            await _refuse(send, 401, "unauthorized", "this server requires the member key")
            return
        await self._app(scope, receive, send)

    def _admits(self, path: str, headers: Any) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        text = given.decode("utf-8", "surrogateescape")
        if self._member.accepts(text):
            return True
        return path == _METRICS and self._metrics is not None and self._metrics.accepts(text)

    def _look(self) -> None:
        now_s = self._clock.now()
        if now_s - self._looked_s < POLL_S:
            return
        self._looked_s = now_s
        if self._watch.has_changed() and reload_all(self._keys):
            _LOG.info("keys have been read again")


def _required(variable: str) -> SharedKey:
    file = os.environ.get(variable)
    if not file:
        raise InputError("is not set", where=variable, fix="name the file with the member key")
    return SharedKey.read(Path(file))


async def _refuse(send: Send, status: int, code: str, message: str) -> None:
    body = msgspec.json.encode({"error": {"message": message, "type": code, "code": code}})
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
