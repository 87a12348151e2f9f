"""Sends spans to a collector by OTLP over HTTP.

    record ──► export: a bounded queue ──► a thread: batches, every `GATHER_S` ──► a process that
    encodes and posts them (`sender_process.py`)

A collector that is slow or down costs spans and never a request: spans beyond `MOST_WAITING` are
dropped and counted. OpenTelemetry's packages are the extra `otel`; `sender.py` alone imports
them. Their variables for headers, certificates, compression and timeouts apply, as documented there
(OTEL_EXPORTER_OTLP_HEADERS and so on).
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Final, TypeAlias
from urllib.parse import urlsplit

from prfaas.errors import InputError
from prfaas.tracing.otlp.sender_process import About, SenderProcess
from prfaas.tracing.recorder import SpanExporter
from prfaas.tracing.spans import Service, Span

log = logging.getLogger(__name__)

# Where OpenTelemetry's libraries look for the collector. The first one wins.
ENDPOINT_VARIABLES: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
MOST_WAITING = 8_192  # spans
MOST_IN_BATCH = 512
GATHER_S = 0.5  # between two batches: a thread that wakes up for each span would cost more
FLUSH_S = 3.0  # for the remaining spans at the end
END_S = 1.0  # for the thread to end, after a flush that was not in time
_TRACES = "/v1/traces"
_FIX = "install it: pip install 'prfaas[otel]'"

# Returns why the collector has not taken the spans; empty: it has.
Send: TypeAlias = Callable[[Sequence[Span]], str]


class BatchingExporter:
    """A `SpanExporter`. `send` is called on a thread of its own and may take its time."""

    def __init__(self, send: Send, gather_s: float = GATHER_S) -> None:
        self.dropped = 0  # spans that the collector did not get
        self._send = send
        self._gather_s = gather_s
        self._waiting: deque[Span] = deque()
        self._arrived = threading.Event()
        self._closing = threading.Event()
        self._refused = False  # the last batch
        self._thread = threading.Thread(target=self._work, name="prfaas-otlp", daemon=True)
        self._thread.start()

    def export(self, span: Span) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self.dropped += 1
            return
        self._waiting.append(span)
        if not self._arrived.is_set():
            self._arrived.set()

    def close(self, within_s: float) -> bool:
        """Sends what waits, and returns after `within_s` at the latest: False when some spans are
        still being sent."""
        self._closing.set()
        self._arrived.set()
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            self._arrived.wait()
            self._closing.wait(self._gather_s)
            self._arrived.clear()
            while self._waiting:
                count = min(MOST_IN_BATCH, len(self._waiting))
                self._send_batch([self._waiting.popleft() for _ in range(count)])
            if self._closing.is_set() and not self._waiting:
                return

    def _send_batch(self, batch: Sequence[Span]) -> None:
        problem = self._send(batch)
        if problem:
            self.dropped += len(batch)
            if not self._refused:
                log.warning("spans are dropped until the collector takes them: %s", problem)
        elif self._refused:
            log.info("the collector takes spans again; %d were dropped so far", self.dropped)
        self._refused = bool(problem)


@contextmanager
def open_exporter(endpoint: str, service: str, node: str = "") -> Iterator[SpanExporter]:
    """`endpoint`: the collector's URL, such as http://localhost:4318; empty: that of the variables.
    `service` and `node` tell the collector which process has made the spans. On exit, the remaining
    spans are sent within a bound. InputError when the endpoint is not a URL, or without the
    extra."""
    url = check_endpoint(endpoint) if endpoint else None
    sender = SenderProcess(About(url, service, node))
    exporter = BatchingExporter(sender.send)
    try:
        yield exporter
    finally:
        in_time = exporter.close(FLUSH_S)
        sender.close()  # ends a wait for the collector
        if not in_time:
            exporter.close(END_S)
            log.warning("the last spans were not sent: the collector did not answer in time")


def chosen_exporter(
    option: str | None, service: Service, node: str = ""
) -> AbstractContextManager[SpanExporter | None]:
    """The exporter to the endpoint that the operator has chosen: `option`, or else that of
    OpenTelemetry's variables, or else none. These variables may be meant for other programs:
    without the extra, they make one warning, and the option is an InputError. The collector knows
    a kvd as `prfaas-kvd`, and so on."""
    if option is not None:
        return open_exporter(option, f"prfaas-{service}", node)
    if not environment_has_endpoint(os.environ):
        return nullcontext(None)
    if (missing := missing_package()) is not None:
        log.warning("spans are not exported, because this needs %s; %s", missing, _FIX)
        return nullcontext(None)
    return open_exporter("", f"prfaas-{service}", node)


def environment_has_endpoint(environment: Mapping[str, str]) -> bool:
    """Whether OpenTelemetry's variables name a collector, and do not switch its libraries off."""
    disabled = environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    return not disabled and any(environment.get(name) for name in ENDPOINT_VARIABLES)


def missing_package() -> str | None:
    """A package of the extra that is not installed; None: the extra is there."""
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        try:
            found = find_spec(package) is not None
        except ModuleNotFoundError:  # of a package around it
            found = False
        if not found:
            return package
    return None


def check_endpoint(endpoint: str) -> str:
    """The URL that spans are posted to. InputError as that of `open_exporter`, for a process that
    loads a model first."""
    url = traces_url(endpoint)
    if (missing := missing_package()) is not None:
        raise InputError(f"exporting spans needs {missing}", where="--otlp-endpoint", fix=_FIX)
    return url


def traces_url(endpoint: str) -> str:
    """The URL that spans are posted to. Operators give the collector's address, or all of it."""
    try:
        url = urlsplit(endpoint)
        known = url.scheme in ("http", "https") and bool(url.hostname)
    except ValueError:
        known = False
    if not known:
        raise InputError(
            f"{endpoint!r} is not a URL",
            where="--otlp-endpoint",
            fix="give the collector's address for OTLP over HTTP, such as http://localhost:4318",
        )
    base = endpoint.rstrip("/")
    return base if base.endswith(_TRACES) else base + _TRACES
