"""What the front (OpenAI over HTTP) asks of the back (routing, hand-off, retries): the seam.

No sockets and no HTTP here. A request that has been read, checked and tokenised is a
`GatewayRequest`; what comes back is the decode engine's own answer, event by event, from its first
token on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from prometheus_client.core import Metric

from prfaas.contracts.kvd_api import Heartbeat
from prfaas.gateway.client.token_ids import TokenIds


@dataclass(frozen=True, slots=True)
class GatewayRequest:
    """One request. `fields` is the client's body less `prompt`, `cache_salt` and
    `kv_transfer_params`: it reaches the decode engine untouched, whatever it holds (messages,
    tools, reasoning, structured output, ...); but streams always ask for their usage."""

    id: str  # names the request in logs, at the nodes (X-Request-Id) and to the client
    path: Literal["/v1/completions", "/v1/chat/completions"]
    token_ids: TokenIds
    fields: Mapping[str, Any]
    salt: str  # the tenant's; prompts of different salts share no cache
    stream: bool
    conversation: bool  # more turns are likely, so a state at the last boundary will be of use
    prompt_logprobs: bool = False
    adapter: str = ""
    multimodal: bool = False


@dataclass(slots=True)
class RequestTrace:
    """What became of a request; filled in as it happens, then logged and counted once."""

    arrived_s: float
    cluster: str = ""  # that prefilled
    prefill: str = ""
    decode: str = ""
    offloaded: bool = False
    reason: str = ""
    cached_tokens: int = 0
    nbytes: int = 0  # handed off, as expected by the route; the kvd counts what was sent
    attempts: int = 0
    waited_s: float = 0.0  # until its prefill began; 0 where none was handed off
    # Moments on the gateway's clock; None: it never came to that.
    routed_s: float | None = None
    granted_s: float | None = None
    committed_s: float | None = None
    first_token_s: float | None = None
    failures: list[str] = field(default_factory=list)  # of attempts, one line each


class Upstream(Protocol):
    """The decode engine's answer. For a stream every item is a list of whole events
    (`data: ...\\n\\n`) that have come together, of which the first is there already; else the one
    item is the whole JSON body."""

    def events(self) -> AsyncIterator[Sequence[bytes]]:
        """Raises `StreamBroken`."""


class Backend(Protocol):
    def answer(
        self, ask: GatewayRequest, story: RequestTrace
    ) -> AbstractAsyncContextManager[Upstream]:
        """Entering waits for the first token (raises `RequestError`); leaving, also by
        cancellation, gives up whatever is still under way: grant, prefill, transfer, decode."""

    def explain(self, ask: GatewayRequest) -> dict[str, Any]:
        """Where it would go now and why, with every alternative's predicted TTFT. Dispatches
        nothing."""

    def state(self) -> dict[str, Any]: ...

    def metrics(self) -> Iterable[Metric]:
        """What the back counts, for Prometheus."""

    def plan(self) -> dict[str, Any]: ...

    def register(self, beat: Heartbeat) -> None:
        """A kvd says that it is there. Raises `RequestError`."""
