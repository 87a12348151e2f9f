"""The gateway's section of the deployment file: address, limits, timeouts.

The string below a field is its entry in docs/configuration.md (`make docs`).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from prfaas.config.fields import Amount, AmountOrZero, Count, Port
from prfaas.config.tls import TlsSection


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One API key of a tenant. Give either `key` or `file`."""

    key: str | None = None
    """The key itself."""
    file: str | None = None
    """File with the key, relative to the deployment file; several lines are several keys."""
    tenant: str = ""
    """Tenant of the key. Tenants do not share cached prefixes."""


class TenantSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Weight and limits of one tenant. A key that is not set has the value of
    `[gateway.tenant_default]`. `[gateway.tenants.NAME]` is an error where no key of
    `[[gateway.keys]]` has the tenant NAME."""

    weight: Amount | None = None
    """Weight of the tenant when requests wait: the prefill time of the nodes, and the time in which
    this gateway reads and tokenises requests, are shared between the tenants that wait, in
    proportion to their weights. The default is 1."""
    max_in_flight: Count | None = None
    """Sequences of the tenant in flight: each choice (`n`) of each prompt counts. Further requests
    are refused with status 429, and a request that alone has more choices with status 400. The
    default is `gateway.max_in_flight`, and half of it where the gateway has several tenants."""
    max_queued_tokens: Count | None = None
    """Prompt tokens of the tenant's requests that have no first token yet, counted once for each
    choice. Further requests are refused with status 429, but a request that is alone is served,
    whatever its length. The default is `gateway.max_queued_tokens`, and half of it where the
    gateway has several tenants."""
    max_tokens_per_minute: Count | None = None
    """Prompt tokens that the tenant may send to this gateway in a minute, counted once for each
    choice. A body counts at least one token for every 8 bytes, decompressed, also when it is
    refused. A tenant that has sent more is refused with status 429 until the time has passed. The
    default is no limit."""
    max_bodies_mb: Amount | None = None
    """Bodies of the tenant's requests in flight together, in 10^6 bytes. Further requests are
    refused with status 429, and a body that alone is larger with status 413. The default is
    `gateway.max_bodies_mb`, and half of it where the gateway has several tenants."""


class GatewayTimeouts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long the gateway waits, and how often it polls."""

    queue_s: Amount = 60.0
    """Longest time that one request waits for a free node, over all attempts together."""
    queue_retry_after_s: Amount = 5.0
    """Retry-After that a client receives when the queue is full or the wait was too long."""
    body_s: Amount = 30.0
    """Time that a client has to send its request."""
    stall_s: Annotated[float, msgspec.Meta(gt=0, le=150)] = 120.0
    """A client that reads nothing for this long is disconnected. Nodes take a peer that
    acknowledges nothing for 180 s for gone, so that a longer wait would end there."""
    drain_s: AmountOrZero = 30.0
    """Time in which running responses may finish, after the gateway has closed its port."""
    cancel_s: Amount = 5.0
    """Time after the drain in which cancelled requests release what they hold at kvds."""
    connect_s: Amount = 3.0
    """Time to connect to a node or a kvd."""
    kvd_call_s: Amount = 5.0
    """Time for one response of a kvd. Opening a transfer may take twice this time."""
    prefill_s: Amount = 600.0
    """Time for one prefill, and for the commit of its transfer."""
    token_s: Amount = 300.0
    """Longest time between two events of a decode stream, and until its first event."""
    link_down_s: Amount = 3.0
    """A hand-off over a link that has been down for this long is given up."""
    prefix_copy_s: Amount = 1.0
    """Time that a prefill waits for a prefix copy, beside four times its predicted duration."""
    node_poll_s: Amount = 1.0
    """Interval of the polls of a node's metrics and health."""
    node_poll_timeout_s: Amount = 3.0
    """Time for a node's response to one poll."""
    kvd_poll_s: Amount = 0.5
    """Interval of the polls of a kvd's report, which describes its links."""
    event_poll_s: Amount = 30.0
    """Duration of one long poll for a kvd's cache events."""
    silent_s: Amount = 1.5
    """A node that has left a poll unanswered for this long, and sent nothing else, is silent.
    Requests without a first token continue elsewhere, and new requests avoid the node."""
    unresponsive_s: Amount = 4.0
    """The longest time that `silent_s` grows to for a node whose answers were late, as on a busy
    machine: to three times the latest answer of the last 30 to 60 s."""
    hung_s: Amount = 10.0
    """Responses that have begun end with an error when their node was silent for this long."""
    forget_s: Amount = 60.0
    """A registered node that has not responded for this long is removed from the fleet."""
    first_plan_s: Amount = 5.0
    """Longest wait for the nodes of the deployment file before the first plan."""
    leave_s: AmountOrZero = 5.0
    """Time after SIGTERM in which the gateway is not ready any more (`/ready`), but still accepts
    requests, so that load balancers notice. SIGINT skips it."""

    @property
    def open_s(self) -> float:
        """Time to open a transfer, connecting included."""
        return 2 * self.kvd_call_s


class GatewaySection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The OpenAI endpoint of a deployment (`prfaas gateway`)."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Port = 8080
    """Port to listen on; 0 lets the system choose a free one."""
    tokenizer: str | None = None
    """Checkpoint folder with the model's tokenizer, relative to the deployment file. Without it,
    prompts must be token ids."""
    keys: list[ApiKey] = []
    """API keys of tenants, which open `/v1/*`. Without keys, the gateway does not authenticate
    clients, and listens on loopback only."""
    tenant_default: TenantSection = TenantSection()
    tenants: dict[str, TenantSection] = {}
    operator_key_file: str | None = None
    """File with the operator key, which opens `/prfaas/v1/*` and `/metrics`, relative to the
    deployment file. With API keys but without this key, these paths are closed."""
    metrics_key_file: str | None = None
    """File with the metrics key, for Prometheus: it opens `/metrics` and nothing else. Relative to
    the deployment file."""
    member_key_file: str | None = None
    """File with the member key, which the gateways, nodes and kvds of a deployment share, relative
    to the deployment file. Without it, kvds cannot register."""
    salt_file: str | None = None
    """File with the secret from which the cache salts of tenants are derived, relative to the
    deployment file. All gateways of a deployment need the same. Without it, each start of the
    gateway makes its own, and tenants' cached prefixes are not found again."""
    insecure: bool = False
    """Whether the gateway may listen on more than loopback without API keys and TLS, and whether
    kvds may register without a member key. Then every process that reaches it can use the
    deployment and join it."""
    proxies: list[str] = []
    """Addresses and networks of proxies before the gateway, such as 10.0.0.7 or 10.0.0.0/24. One
    address may have half of the gateway's connections; these may have more, because their
    connections are those of many clients."""
    console: bool = False
    """Whether the gateway serves its console, a page for browsers, at `/`. It shows what
    `/prfaas/v1/state` has, after a login with the operator key, and needs that key where there are
    API keys ([console.md](console.md))."""
    otlp_endpoint: str | None = None
    """URL of a collector that spans are sent to by OTLP over HTTP, for example
    http://localhost:4318; needs the extra `otel` ([tracing.md](tracing.md)). The default is that of
    the variable OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT, if one is set.
    """
    plans: bool = True
    """Whether this gateway runs the long-term loop. Exactly one gateway of a fleet does."""
    advise: bool = False
    """Whether plans are only shown, and threshold and roles stay as they are."""
    max_in_flight: Count = 2048
    """Sequences in flight: each choice (`n`) of each prompt counts. Further requests are refused
    with status 429."""
    max_queued: Count = 4096
    """Requests that wait for a node. Further requests are refused with status 429."""
    max_queued_tokens: Count = 100_000_000
    """Prompt tokens of the requests that have no first token yet, counted once for each choice.
    Further requests are refused with status 429."""
    max_attempts: Count = 4
    """Attempts of one request, including the first."""
    max_body_mb: Amount = 64.0
    """Largest request body in 10^6 bytes. One million token ids take about 8 MB of JSON."""
    max_bodies_mb: Amount = 1024.0
    """Bodies of all requests in flight together, in 10^6 bytes, and their answers as far as they
    wait in memory: those that do not stream, and events that have not arrived to their end, of
    more than 256 KiB each."""
    credentials_poll_s: AmountOrZero = 0.0
    """Interval at which the files of keys and certificates are checked, and read again where they
    have changed; 0: only SIGHUP makes the process read them again."""
    tls: TlsSection = TlsSection()
    timeouts: GatewayTimeouts = GatewayTimeouts()


DEFAULTS = GatewaySection()
