"""The gateway's API over one node: both in this process, over real sockets. The backend sends every
request to that node and hands nothing off, so that tests observe only the API."""

from __future__ import annotations

import asyncio
import io
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from prometheus_client.core import GaugeMetricFamily, Metric

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment, parse_deployment
from prfaas.contracts.gateway_api import GatewayReport
from prfaas.contracts.kvd_api import Heartbeat
from prfaas.engine.checkpoint.tokenizer import save_tokenizer
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import RequestError, StreamBroken
from prfaas.gateway.api.credentials import GatewayCredentials, TenantKey
from prfaas.gateway.client.request_body import encode_body
from prfaas.gateway.console.scenes import SceneSource
from prfaas.gateway.process import GatewayOptions, serving
from prfaas.gateway.request import CollectedSpans, GatewayRequest, RequestTrace, Upstream
from prfaas.http_client.paced_writer import RequestBody
from prfaas.scheduler.explain import Explanation
from prfaas.security.shared_key import SharedKey
from prfaas.text import ModelTokenizer
from tests.engine.emulated.builders import emulated
from tests.node.local_api import BYTES, LocalApi, local_api
from tests.waiting import HANG_S

MAX_TOKENS = 4096
FAST = Scales(time=1e-3)


def deployment(**section: Any) -> Deployment:
    return parse_deployment(
        {
            "model": {"name": "made-up", "max_tokens": MAX_TOKENS},
            "workload": {
                **{"kind": "lognormal", "mu": 6.0, "sigma": 1.0, "min_tokens": 16},
                **{"max_tokens": MAX_TOKENS, "output_tokens": 100},
            },
            "slo": {"output_tokens_per_s": 10.0},
            "clusters": [
                {
                    **{"name": "pd", "kind": "pd", "accelerator": "h20"},
                    **{"gpus": 16, "gpus_per_instance": 8},
                }
            ],
            "gateway": {**section, "timeouts": {"drain_s": 0.1, **section.get("timeouts", {})}},
        },
        "deployment.toml",
    )


class _Answer:
    def __init__(self, response: aiohttp.ClientResponse, *, stream: bool, stays_open: bool) -> None:
        self._response = response
        self._stream = stream
        self._stays_open = stays_open

    async def events(self) -> AsyncIterator[list[bytes]]:
        if not self._stream:
            yield [await self._response.read()]
            return
        rest = b""
        try:
            async for chunk in self._response.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                yield [event + b"\n\n" for event in events]
        except aiohttp.ClientError as error:
            raise StreamBroken(str(error)) from error
        if self._stays_open:
            await asyncio.Event().wait()  # until the request is cancelled


@dataclass(slots=True)
class OneNode:
    """A backend with one node."""

    node: LocalApi
    stays_open: bool = False  # responses do not end after their last event
    before_answer: Callable[[], Awaitable[object]] | None = None  # awaited before the first token
    requests: list[GatewayRequest] = field(default_factory=list)
    traces: list[RequestTrace] = field(default_factory=list)
    heartbeats: list[Heartbeat] = field(default_factory=list)
    report: Callable[[int], GatewayReport | None] = lambda after: None
    drained: dict[str, bool] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @asynccontextmanager
    async def answer(self, request: GatewayRequest, trace: RequestTrace) -> AsyncIterator[Upstream]:
        self.requests.append(request)
        self.arrived.set()
        self.traces.append(trace)
        body = {**request.fields, "cache_salt": request.salt}
        if request.path == "/v1/completions":
            body["prompt"] = request.token_ids.json()
        trace.attempts, trace.reason, trace.routed_s = 1, "the only node", trace.arrived_s
        try:
            if self.before_answer is not None:
                await self.before_answer()
            async with self.node.http.post(
                request.path, data=joined(encode_body(body)), headers=request.headers
            ) as response:
                if response.status != 200:
                    error = (await response.json())["error"]
                    raise RequestError(
                        response.status, error["code"], error["message"], param=error["param"]
                    )
                trace.first_token_s = MonotonicClock().now()
                yield _Answer(response, stream=request.stream, stays_open=self.stays_open)
        finally:
            self.ended.set()

    def explain(self, request: GatewayRequest) -> dict[str, Any]:
        return {"prompt_tokens": len(request.token_ids), "salt": request.salt}

    def unready_reason(self) -> str:
        return ""

    def state(self) -> dict[str, Any]:
        return {"nodes": 1}

    def metrics(self) -> list[Metric]:
        return [GaugeMetricFamily("prfaas_gateway_nodes", "Nodes of the backend.", 1)]

    def plan(self) -> dict[str, Any]:
        return {"threshold_tokens": 1}

    async def register(self, heartbeat: Heartbeat) -> None:
        self.heartbeats.append(heartbeat)

    def gateway_report(self, after: int) -> GatewayReport | None:
        return self.report(after)

    async def collect_spans(self, trace_id: str, nodes: Collection[str]) -> CollectedSpans:
        return CollectedSpans([], [f"{node} was not asked" for node in nodes])

    def describe(self, explanation: Explanation) -> dict[str, Any]:
        return {"threshold_tokens": explanation.threshold_tokens}

    async def drain(self, cluster: str, drained: bool) -> dict[str, Any]:
        if cluster != "pd":
            raise RequestError(400, "unknown_cluster", f"no cluster {cluster!r}", param="cluster")
        self.drained[cluster] = drained
        return {"cluster": cluster, "drained": drained}


@dataclass(frozen=True, slots=True)
class ApiServer:
    url: str
    http: aiohttp.ClientSession
    backend: OneNode

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        data = io.BytesIO(body if isinstance(body, bytes) else msgspec.json.encode(body))
        async with self.http.post(f"{self.url}{path}", data=data, headers=headers) as answer:
            return answer.status, msgspec.json.decode(await answer.read())

    async def get(self, path: str, **headers: str) -> tuple[int, bytes]:
        async with self.http.get(f"{self.url}{path}", headers=headers) as answer:
            return answer.status, await answer.read()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)


@contextmanager
def _bytes_folder() -> Iterator[Path]:
    """The folder of the tokenizer `BYTES`, for body workers."""
    with tempfile.TemporaryDirectory() as name:
        save_tokenizer(Path(name), max_tokens=MAX_TOKENS)
        yield Path(name)


def joined(body: RequestBody) -> bytes:
    return body if isinstance(body, bytes) else b"".join(body)


@asynccontextmanager
async def api_server(
    *,
    keys: Sequence[TenantKey] = (),
    operator: SharedKey | None = None,
    member: SharedKey | None = None,
    any_member: bool = False,
    tokenizer: ModelTokenizer | None = BYTES,
    scales: Scales = FAST,
    timeout_s: float | None = HANG_S,
    scenes: SceneSource | None = None,
    **section: Any,
) -> AsyncIterator[ApiServer]:
    """`scenes`: what the console shows; None: there is no console."""
    engine = emulated(scales=scales, vocab_size=264, max_tokens=MAX_TOKENS, max_running=8)
    async with (
        asyncio.timeout(timeout_s),
        local_api(engine, BYTES) as node,
        aiohttp.ClientSession() as http,
        AsyncExitStack() as stack,
    ):
        backend = OneNode(node)
        credentials = GatewayCredentials(
            lambda: keys, operator=operator, member=member, insecure=any_member
        )
        listed = [{"key": key.secret, "tenant": key.tenant} for key in keys]
        folder = None if tokenizer is None else stack.enter_context(_bytes_folder())
        options = GatewayOptions(
            tokenizer=tokenizer, tokenizer_folder=folder, credentials=credentials
        )
        with socket.create_server(("127.0.0.1", 0)) as listening:
            async with serving(
                deployment(keys=listed, **section),
                backend,
                options,
                MonotonicClock(),
                listening,
                scenes=scenes,
            ) as url:
                yield ApiServer(url, http, backend)
