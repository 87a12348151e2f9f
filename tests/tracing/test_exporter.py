"""The exporter's queue and thread, the choice of an endpoint, and spans at a real receiver."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from prfaas import __version__
from prfaas.clock import MonotonicClock
from prfaas.errors import InputError
from prfaas.tracing.context import new_trace
from prfaas.tracing.otlp import exporter as exporter_module
from prfaas.tracing.otlp import sender as sender_module
from prfaas.tracing.otlp import sender_process
from prfaas.tracing.otlp.exporter import (
    ENDPOINT_VARIABLES,
    MOST_WAITING,
    BatchingExporter,
    chosen_exporter,
    environment_has_endpoint,
    open_exporter,
    traces_url,
)
from prfaas.tracing.otlp.sender import OtlpSender
from prfaas.tracing.otlp.sender_process import (
    About,
    Reply,
    SenderProcess,
    read_message,
    write_message,
)
from prfaas.tracing.recorder import SpanRecorder
from prfaas.tracing.spans import Span
from tests.tracing.otlp_receiver import receiver_thread
from tests.waiting import PATIENCE_S, wait_until


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*ENDPOINT_VARIABLES, "OTEL_SDK_DISABLED", "OTEL_EXPORTER_OTLP_HEADERS"):
        monkeypatch.delenv(name, raising=False)


def span(number: int = 0) -> Span:
    return Span("request", "a" * 32, f"{number:016x}", 1.0, 2.0, "gateway")


class Collector:
    """What `send` does in these tests."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.open = threading.Event()
        self.open.set()
        self.waiting = threading.Event()  # a call waits until it is open
        self.problem = ""

    def send(self, spans: Sequence[Span]) -> str:
        self.waiting.set()
        assert self.open.wait(PATIENCE_S)
        if not self.problem:
            self.spans += spans
        return self.problem


# The queue and the thread -------------------------------------------------------------------------


def test_every_span_is_sent_once_and_in_order() -> None:
    collector = Collector()
    exporter = BatchingExporter(collector.send, gather_s=0.0)
    spans = [span(number) for number in range(2_000)]
    for one in spans:
        exporter.export(one)
    assert exporter.close(PATIENCE_S)
    assert collector.spans == spans and exporter.dropped == 0


def test_spans_beyond_the_bound_are_dropped_and_counted() -> None:
    collector = Collector()
    collector.open.clear()
    exporter = BatchingExporter(collector.send, gather_s=0.0)
    exporter.export(span())
    assert collector.waiting.wait(PATIENCE_S)  # the thread has taken the first one
    for number in range(MOST_WAITING + 7):
        exporter.export(span(number))
    assert exporter.dropped == 7
    collector.open.set()
    assert exporter.close(PATIENCE_S)
    assert len(collector.spans) == 1 + MOST_WAITING


def test_closing_does_not_wait_for_a_collector_that_hangs() -> None:
    collector = Collector()
    collector.open.clear()
    exporter = BatchingExporter(collector.send, gather_s=0.0)
    exporter.export(span())
    assert not exporter.close(0.01)
    collector.open.set()
    assert exporter.close(PATIENCE_S)


def test_a_collector_that_refuses_costs_its_spans_alone(caplog: pytest.LogCaptureFixture) -> None:
    collector = Collector()
    collector.problem = "it refuses"
    exporter = BatchingExporter(collector.send, gather_s=0.0)
    exporter.export(span(1))
    wait_until(lambda: exporter.dropped == 1)
    collector.problem = ""
    exporter.export(span(2))
    assert exporter.close(PATIENCE_S)
    assert collector.spans == [span(2)]
    (warning,) = caplog.records
    assert "it refuses" in warning.getMessage()


# The choice of an endpoint ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "endpoint, url",
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://collector/otlp", "https://collector/otlp/v1/traces"),
        ("https://collector/otlp/v1/traces", "https://collector/otlp/v1/traces"),
    ],
)
def test_the_path_of_traces_is_added(endpoint: str, url: str) -> None:
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("endpoint", ["localhost:4318", "ftp://x", "http://", "http://[x"])
def test_an_endpoint_that_is_not_a_url_is_named(endpoint: str) -> None:
    with pytest.raises(InputError, match="--otlp-endpoint") as refused:
        with open_exporter(endpoint, "prfaas-kvd"):
            pass
    assert "http://localhost:4318" in str(refused.value)


def test_the_environment_chooses_an_endpoint_too() -> None:
    assert not environment_has_endpoint({})
    for name in ENDPOINT_VARIABLES:
        assert environment_has_endpoint({name: "http://localhost:4318"})
        assert not environment_has_endpoint({name: ""})
        assert not environment_has_endpoint({name: "http://x", "OTEL_SDK_DISABLED": "TRUE"})


def test_without_an_endpoint_nothing_is_exported() -> None:
    with chosen_exporter(None, "kvd") as exporter:
        assert exporter is None


def test_without_the_extra_the_option_is_an_error_with_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(exporter_module, "missing_package", lambda: "opentelemetry")
    with pytest.raises(InputError) as refused, chosen_exporter("http://x", "kvd"):
        pass
    message = str(refused.value)
    assert "--otlp-endpoint" in message and "pip install 'prfaas[otel]'" in message


def test_without_the_extra_the_environment_makes_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(exporter_module, "missing_package", lambda: "opentelemetry")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318")
    with chosen_exporter(None, "kvd") as exporter:
        assert exporter is None
    (warning,) = caplog.records
    assert warning.levelname == "WARNING" and "prfaas[otel]" in warning.getMessage()


def test_the_extra_is_noticed_when_it_is_missing(tmp_path: Path) -> None:
    """In a process that cannot import OpenTelemetry."""
    code = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from prfaas.tracing.otlp.exporter import missing_package\n"
        "assert (missing_package() or '').startswith('opentelemetry')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


# A real receiver ----------------------------------------------------------------------------------


def test_a_span_arrives_with_everything_that_it_has() -> None:
    parent = new_trace(sampled=True)
    with receiver_thread() as receiver:
        with open_exporter(receiver.url, "prfaas-kvd", "east-1") as exporter:
            recorder = SpanRecorder("kvd", MonotonicClock(), "east-1", exporter)
            attributes = {"text": "a", "number": 3, "share": 0.5, "flag": True}
            server = recorder.record(
                "kvd grant", parent, recorder.now() - 1.0, kind="server", attributes=attributes
            )
            failed = recorder.record("kvd send", parent, recorder.now(), error="the link is cut")
        one, two = sorted(receiver.of(parent.trace_id), key=lambda span: span.name)
    assert (one.name, one.kind, one.error) == ("kvd grant", "server", "")
    assert (one.span_id, one.parent_id) == (server.span_id, parent.span_id)
    assert one.attributes == attributes
    assert one.start_s == pytest.approx(server.start_s, abs=1e-6)
    assert one.end_s == pytest.approx(server.end_s, abs=1e-6)
    assert (one.service, one.node) == ("prfaas-kvd", "east-1")
    assert (two.span_id, two.kind, two.error) == (failed.span_id, "internal", "the link is cut")


def test_the_variables_for_headers_and_endpoints_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiver_thread() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=ours")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
        with chosen_exporter(None, "node", "east-1") as exporter:
            assert exporter is not None
            exporter.export(span(7))
        (found,) = receiver.spans
        (headers,) = receiver.headers
    assert found.span_id == span(7).span_id and found.service == "prfaas-node"
    assert headers["x-tenant"] == "ours" and headers["Content-Encoding"] == "gzip"
    assert headers["User-Agent"].startswith("OTel-OTLP-Exporter-Python")


def test_a_collector_that_does_not_exist_delays_the_end_by_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library would try for 10 s."""
    monkeypatch.setattr(exporter_module, "FLUSH_S", 0.05)
    with open_exporter("http://127.0.0.1:9", "prfaas-kvd") as exporter:
        exporter.export(span())
    assert isinstance(exporter, BatchingExporter)
    assert exporter.close(PATIENCE_S) and exporter.dropped == 1


def test_a_collector_that_refuses_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with receiver_thread() as receiver:
        receiver.status = 400
        with open_exporter(receiver.url, "prfaas-kvd") as exporter:
            exporter.export(span(1))
            wait_until(lambda: receiver.headers != [])
            receiver.status = 200
    assert isinstance(exporter, BatchingExporter) and exporter.dropped == 1
    (warning,) = caplog.records
    assert "400" in warning.getMessage()


def test_a_process_that_is_killed_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_process, "RESTART_S", 0.0)
    with receiver_thread() as receiver:
        sender = SenderProcess(About(f"{receiver.url}/v1/traces", "prfaas-kvd", ""))
        try:
            assert sender.send([span(1)]) == ""
            sender._process.kill()
            sender._process.wait()
            assert sender.send([span(2)]) == ""
        finally:
            sender.close()
        assert [one.span_id for one in receiver.spans] == [span(1).span_id, span(2).span_id]
        assert sender.send([span(3)]) != ""  # not after its end


def test_signals_for_the_parent_do_not_end_the_process() -> None:
    """Its parent still has spans to send."""
    with receiver_thread() as receiver:
        sender = SenderProcess(About(f"{receiver.url}/v1/traces", "prfaas-kvd", ""))
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                sender._process.send_signal(number)
            assert sender.send([span(1)]) == ""
        finally:
            sender.close()


def test_the_process_ends_with_its_input() -> None:
    """So it ends with its parent, even when that one is killed."""
    process = subprocess.Popen(
        [sys.executable, "-m", sender_process.MODULE],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0


def test_a_variable_that_the_library_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(about: About) -> OtlpSender:
        raise ValueError("much is not a valid Compression")

    monkeypatch.setattr(sender_module, "OtlpSender", refuse)
    source, sink = io.BytesIO(), io.BytesIO()
    write_message(source, About(None, "prfaas-kvd", ""))
    source.seek(0)
    sender_module.serve(source, sink, sender_module.LastMessage())
    sink.seek(0)
    reply = read_message(sink, Reply)
    assert reply is not None and "Compression" in reply.problem


def test_a_process_that_cannot_work_is_an_input_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_process, "MODULE", "prfaas.tracing.otlp.no_such_module")
    with pytest.raises(InputError, match="spans cannot be exported"):
        SenderProcess(About(None, "prfaas-kvd", ""))


def test_a_message_that_is_cut_off_is_the_end() -> None:
    whole = io.BytesIO()
    write_message(whole, [span(1), span(2)])
    for size in range(len(whole.getvalue())):
        assert read_message(io.BytesIO(whole.getvalue()[:size]), list[Span]) is None
    assert read_message(io.BytesIO(whole.getvalue()), list[Span]) == [span(1), span(2)]
    assert read_message(io.BytesIO(b"\xff" * 100), list[Span]) is None  # longer than any message


def test_the_version_is_told() -> None:
    sender = OtlpSender(About("http://127.0.0.1:9/v1/traces", "prfaas-kvd", "east-1"))
    about = sender.resource.attributes
    sender.close()
    assert (about["service.version"], about["service.instance.id"]) == (__version__, "east-1")
