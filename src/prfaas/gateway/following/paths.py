"""The paths on which operators follow requests: a list, and one request with its spans."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec
from aiohttp import web

from prfaas.clock import Clock
from prfaas.contracts.trace_api import REQUESTS_PATH, FollowedRequest, KeptRequests
from prfaas.errors import RequestError
from prfaas.gateway.following.alignment import join_spans
from prfaas.gateway.following.kept_requests import KeptRequest, RequestHistory
from prfaas.gateway.following.request_spans import request_spans
from prfaas.gateway.following.summaries import summary_of
from prfaas.gateway.request import Backend
from prfaas.tracing.diagnosis import find_causes
from prfaas.tracing.epoch import EpochOffset
from prfaas.tracing.summary import RequestSummary

MOST_LOOKUPS = 8  # at once: each asks several nodes and kvds


class FollowingPaths:
    def __init__(
        self,
        history: RequestHistory,
        backend: Backend,
        model: str,
        clock: Clock,
        epoch: Callable[[], float] = time.time,
    ) -> None:
        self._history = history
        self._backend = backend
        self._model = model
        self._to_epoch = EpochOffset(clock, epoch)
        self._lookups = 0

    def add_to(self, app: web.Application) -> None:
        app.router.add_get(REQUESTS_PATH, self._list)
        app.router.add_get(f"{REQUESTS_PATH}/{{id}}", self._one)

    async def _list(self, request: web.Request) -> web.Response:
        to_epoch_s = self._to_epoch.seconds()

        def lines(kept: list[KeptRequest]) -> tuple[RequestSummary, ...]:
            return tuple(summary_of(each, to_epoch_s) for each in kept)

        history = self._history
        return _json(
            KeptRequests(lines(history.latest()), lines(history.slowest()), lines(history.failed()))
        )

    async def _one(self, request: web.Request) -> web.Response:
        kept = self._history.find(request.match_info["id"])
        if kept is None:
            raise RequestError(
                404,
                "not_found",
                "the gateway does not have this request, or has forgotten it; "
                f"GET {REQUESTS_PATH} lists those that it has",
            )
        if self._lookups >= MOST_LOOKUPS:
            raise RequestError(
                429, "too_many_lookups", "too many requests are looked up", retry_after_s=1.0
            )
        self._lookups += 1
        try:
            return _json(await self._follow(kept))
        finally:
            self._lookups -= 1

    async def _follow(self, kept: KeptRequest) -> FollowedRequest:
        trace_id = kept.record.trace.context.trace_id
        collected = await self._backend.collect_spans(trace_id, nodes_of(kept))
        # After the collection: a request in progress has come further meanwhile.
        to_epoch_s = self._to_epoch.seconds()
        summary = summary_of(kept, to_epoch_s)
        spans = join_spans(request_spans(kept, self._model, to_epoch_s), collected.spans)
        found = kept.explanation
        explanation = None if found is None else self._backend.describe(found)
        return FollowedRequest(
            request=summary,
            causes=find_causes(summary, spans, explanation),
            spans=tuple(spans),
            missing=tuple(collected.missing),
            explanation=explanation,
        )


def nodes_of(kept: KeptRequest) -> list[str]:
    """The nodes that have served the request, in the order in which they did."""
    found: dict[str, None] = {}
    for prompt in kept.record.each_prompt:
        for course in prompt.trace.courses:
            route = course.route
            for copy in route.copies:
                found |= {copy.source: None, copy.target: None}
            found |= {route.prefill: None, route.decode: None}
    return list(found)


def _json(answer: KeptRequests | FollowedRequest) -> web.Response:
    return web.Response(body=msgspec.json.encode(answer), content_type="application/json")
