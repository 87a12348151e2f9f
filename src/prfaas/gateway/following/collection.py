"""Collects the spans of one trace from the nodes and kvds that have served it.

All of them are asked at once, and the slowest has `COLLECT_S`. What a member says is checked: it
can only speak for itself, and only of the trace that was asked about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

import msgspec

from prfaas.contracts.trace_api import TRACES_PATH, ProcessSpans
from prfaas.errors import PeerError
from prfaas.gateway.fleet.fleet import Fleet
from prfaas.gateway.request import CollectedSpans
from prfaas.http_client.client import HttpClient
from prfaas.supervision import one_line
from prfaas.tracing.spans import MOST_TEXT, Service, Span, Value
from prfaas.types import NodeId

COLLECT_S: Final = 2.0
MOST_NODES: Final = 16  # that are asked about one request
PAGE_BYTES: Final = 1 << 18
MOST_ATTRIBUTES: Final = 32
_MOST_PROBLEM_CHARS = 200
_LATEST_S = 1e11  # a time since the epoch that is a time


class _Process(NamedTuple):
    node: str
    service: Service
    url: str


class SpanCollector:
    def __init__(self, fleet: Fleet, http: HttpClient) -> None:
        self._fleet = fleet
        self._http = http

    async def collect(self, trace_id: str, nodes: Collection[str]) -> CollectedSpans:
        missing: list[str] = []
        asked = list(dict.fromkeys(nodes))
        if len(asked) > MOST_NODES:
            missing.append(f"{len(asked) - MOST_NODES} more nodes were not asked")
        processes = [
            process for node in asked[:MOST_NODES] for process in self._of_node(node, missing)
        ]
        answers = await asyncio.gather(*(self._ask(each, trace_id) for each in processes))
        spans: list[Span] = []
        for process, answer in zip(processes, answers, strict=True):
            if isinstance(answer, str):
                missing.append(f"{process.service} of {process.node}: {answer}")
            else:
                spans += answer
        return CollectedSpans(spans, missing)

    def _of_node(self, node: str, missing: list[str]) -> Iterator[_Process]:
        member = self._fleet.members.named(NodeId(node))
        if member is None:
            missing.append(f"{node} has left")
            return
        yield _Process(node, "kvd", member.kvd_url.rstrip("/"))
        if member.engine_url is None or member.card is None:
            missing.append(f"node of {node}: its engine has left")
        elif member.card.ours:  # vLLM sends its spans to the collector, and nowhere else
            yield _Process(node, "node", member.engine_url.rstrip("/"))

    async def _ask(self, process: _Process, trace_id: str) -> list[Span] | str:
        """The spans, or why there are none."""
        try:
            answer = await self._http.request_json(
                "GET",
                f"{process.url}{TRACES_PATH}{trace_id}",
                ProcessSpans,
                timeout_s=COLLECT_S,
                max_bytes=PAGE_BYTES,
            )
        except PeerError as error:
            return one_line(str(error), _MOST_PROBLEM_CHARS) or "no answer"
        found = [
            checked(span, process.node, process.service)
            for span in answer.spans
            if span.trace_id == trace_id and _is_in_time(span)
        ]
        return found or "it has no spans of this trace any more"


def checked(span: Span, node: str, service: Service) -> Span:
    """The span as the gateway passes it on: of this process, and with short texts on one line."""
    attributes = list(span.attributes.items())[:MOST_ATTRIBUTES]
    return msgspec.structs.replace(
        span,
        name=_text(span.name),
        node=node,
        service=service,
        error=_text(span.error),
        attributes={_text(name): _value(value) for name, value in attributes},
    )


def _is_in_time(span: Span) -> bool:
    return 0.0 <= span.start_s <= span.end_s <= _LATEST_S


def _value(value: Value) -> Value:
    return _text(value) if isinstance(value, str) else value


def _text(text: str) -> str:
    return one_line(text, MOST_TEXT - 3)
