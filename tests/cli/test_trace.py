"""`prfaas trace` at a server that speaks the gateway's two paths."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

import msgspec
import pytest
from rich.console import Console

from prfaas.cli.trace_display import print_followed, print_kept
from prfaas.contracts.trace_api import REQUESTS_PATH, Cause, FollowedRequest, KeptRequests
from prfaas.tracing.spans import DECODE, GRANT, NODE_REQUEST, PREFILL, READ
from tests.cli.runner import Result
from tests.secret_files import write_secret
from tests.tracing.spans_of import SpanList, summary

Run = Callable[..., Result]
KEY = "operator-key-of-a-test-0123456789abcdef"


def followed(node: str = "far-0") -> FollowedRequest:
    spans = SpanList()
    root = spans.request(4.0)
    spans.add(READ, 0.0, 0.01, root)
    failed = spans.attempt(0.01, 1.0, error=f"{node} has fallen silent")
    spans.add(PREFILL, 0.02, 1.0, failed, kind="client")
    attempt = spans.attempt(1.0, 4.0)
    spans.add(GRANT, 1.0, 1.1, attempt)
    call = spans.add(PREFILL, 1.1, 3.0, attempt, kind="client")
    spans.add(NODE_REQUEST, 1.2, 2.9, call, service="node", node=node, kind="server")
    spans.add(DECODE, 3.0, 4.0, attempt, kind="client")
    causes = (
        Cause("slow prefill", 1.9, f"{node} took 1.9 s to prefill 1,000 tokens."),
        Cause("hung node", 1.0, f"One attempt failed: {node} has fallen silent."),
    )
    missing = ("http://10.0.0.1:7080: it has forgotten the trace",)
    request = summary(ttft_s=3.2, total_s=4.0)
    return FollowedRequest(request, causes, tuple(spans.spans), missing)


class Gateway(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.key: str | None = None
        one, slow, bad = (msgspec.structs.replace(summary(), id=n) for n in ("one", "slow", "bad"))
        self.kept = KeptRequests((one, slow, bad), (slow,), (bad,))
        self.asked: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        key = self.server.key
        if key is not None and self.headers["Authorization"] != f"Bearer {key}":
            return self._answer({"error": {"message": "a key is missing"}}, 401)
        if self.path == REQUESTS_PATH:
            return self._answer(self.server.kept)
        wanted = unquote(self.path.removeprefix(f"{REQUESTS_PATH}/"))
        if wanted in {request.id for request in self.server.kept.latest}:
            found = followed()
            named = msgspec.structs.replace(found.request, id=wanted)
            return self._answer(msgspec.structs.replace(found, request=named))
        self._answer({"error": {"message": "not kept"}}, 404)

    def _answer(self, content: object, status: int = 200) -> None:
        body = msgspec.json.encode(content)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_request_is_followed_by_its_id(prfaas: Run, gateway: Gateway) -> None:
    ended = prfaas("trace", "one", "--gateway", gateway.url)
    assert ended.code == 0, ended.err
    for text in ("request one", "read body", "far-0 has fallen silent", "slow prefill"):
        assert text in ended.out
    assert "No spans: http://10.0.0.1:7080: it has forgotten the trace" in ended.out


@pytest.mark.parametrize(("option", "wanted"), [("latest", "one"), ("slowest", "slow")])
def test_the_first_of_a_list_is_followed(
    prfaas: Run, gateway: Gateway, option: str, wanted: str
) -> None:
    ended = prfaas("trace", f"--{option}", "--gateway", gateway.url, "--json")
    assert ended.json["request"]["id"] == wanted
    assert ended.json["causes"][0]["kind"] == "slow prefill"


def test_without_a_choice_the_requests_are_listed(prfaas: Run, gateway: Gateway) -> None:
    ended = prfaas("trace", "--gateway", gateway.url)
    assert [word in ended.out for word in ("latest", "slowest", "failed", "bad")] == [True] * 4
    listed = prfaas("trace", "--gateway", gateway.url, "--json").json
    assert [one["id"] for one in listed["failed"]] == ["bad"]


def test_the_gateway_of_this_machine_is_the_default(prfaas: Run) -> None:
    assert "[default: http://127.0.0.1:8080]" in " ".join(prfaas("trace", "--help").out.split())


def test_an_id_may_have_any_character(prfaas: Run, gateway: Gateway) -> None:
    strange = "a/../b?c#d e"
    one = msgspec.structs.replace(summary(), id=strange)
    gateway.kept = KeptRequests((one,), (), ())
    assert prfaas("trace", strange, "--gateway", gateway.url, "--json").json["request"]


def test_a_file_for_perfetto(prfaas: Run, gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    ended = prfaas("trace", "one", "--gateway", gateway.url, "--perfetto", file)
    assert ended.code == 0 and "ui.perfetto.dev" in ended.err
    events = json.loads(file.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X", "s", "f"}


def test_mistakes_are_one_line_with_the_fix(prfaas: Run, gateway: Gateway, tmp_path: Path) -> None:
    at = ("--gateway", gateway.url)
    both = prfaas("trace", "one", "--failed", *at)
    assert both.code == 2 and "give an ID, or one of" in both.err
    none = prfaas("trace", *at, "--perfetto", tmp_path / "x.json")
    assert none.code == 2 and "no request is chosen" in none.err
    unknown = prfaas("trace", "gone", *at)
    assert unknown.code == 2 and "does not keep gone" in unknown.err
    gateway.kept = KeptRequests((), (), ())
    empty = prfaas("trace", "--failed", *at)
    assert empty.code == 2 and "keeps no failed request" in empty.err
    no_folder = prfaas("trace", "one", *at, "--perfetto", tmp_path / "no" / "x.json")
    assert no_folder.code == 2 and len(no_folder.err.splitlines()) == 1


def test_the_operators_key_opens_the_path(prfaas: Run, gateway: Gateway, tmp_path: Path) -> None:
    gateway.key = KEY
    closed = prfaas("trace", "one", "--gateway", gateway.url)
    assert closed.code == 2 and "--operator-key-file" in closed.err
    file = tmp_path / "key"
    write_secret(file, f"{KEY}\n")
    file.chmod(0o600)
    given = ("--operator-key-file", file)
    assert prfaas("trace", "one", "--gateway", gateway.url, *given).code == 0


@pytest.mark.parametrize("width", [80, 120, 60])
def test_the_waterfall_fits_a_terminal_without_colours(width: int) -> None:
    file = io.StringIO()
    screen = Console(file=file, width=width, force_terminal=False, color_system=None)
    print_followed(screen, followed("a-node-with-a-name-that-is-longer-than-its-column"))
    print_kept(screen, KeptRequests((summary(),) * 3, (), ()))
    printed = file.getvalue()
    assert "\x1b" not in printed
    body = printed.splitlines()[3:]  # ids and routes are not cut: a terminal wraps them
    assert max(map(len, body)) <= width
    (row,) = [line for line in body if "node request" in line]
    assert "█" in row and "1.70 s" in row


def test_a_terminal_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    screen = Console(file=io.TextIOWrapper(raw, "ascii"), width=80)
    print_followed(screen, followed())
    screen.file.flush()
    assert b"#####" in raw.getvalue()


def test_names_of_members_do_not_control_the_terminal() -> None:
    file = io.StringIO()
    screen = Console(file=file, width=100, force_terminal=True, color_system="truecolor")
    print_followed(screen, followed("[bold]x\x1b]0;owned\x07\n"))
    assert "\x1b]0;" not in file.getvalue() and "[bold]x" in file.getvalue()
