"""The spans that kvds record of grants, transfers and copies, and the path that shows them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from prfaas.contracts.kvd_api import AbortTransfer, OpenTransfer, PullPrefix
from prfaas.contracts.trace_api import TRACES_PATH, ProcessSpans
from prfaas.security.shared_key import SharedKey
from prfaas.tracing.context import TRACEPARENT, TraceContext, new_trace
from prfaas.tracing.spans import (
    FORM,
    KVD_GRANT,
    KVD_PULL,
    KVD_RECEIVE,
    KVD_SEND,
    NBYTES,
    TRANSFER_ID,
    Span,
)
from prfaas.types import Grant, NotNow, TransferId
from tests.kvd.hosts import COMPAT, SPEC, Host, begun, fill, kvd, names, prompt_of
from tests.secret_files import write_secret
from tests.tracing.otlp_receiver import receiver_thread
from tests.waiting import PATIENCE_S, wait_until

PROMPT = prompt_of(40)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Host, Host]]:
    """The prefill side's kvd and the decode side's."""
    with kvd(tmp_path, name="p", node="far") as here, kvd(tmp_path, name="d", node="near") as there:
        yield here, there


def spans_of(host: Host, trace: TraceContext) -> list[Span]:
    status, body = host.get(TRACES_PATH + trace.trace_id)
    assert status == 200, body
    return list(msgspec.json.decode(body, type=ProcessSpans).spans)


def open_traced(host: Host, trace: TraceContext) -> Grant:
    asked = OpenTransfer(
        tuple(names(PROMPT)), len(PROMPT), COMPAT, transfer_id=TransferId(str(uuid.uuid4()))
    )
    status, body = host.post("/v1/open", asked, {TRACEPARENT: trace.traceparent})
    assert status == 200, body
    return msgspec.json.decode(body, type=Grant)


def keep(host: Host) -> None:
    with host.engine() as engine:
        lease = begun(engine.begin(names(PROMPT), len(PROMPT)))
        fill(lease, PROMPT)
        lease.commit()


def test_a_hand_off_has_a_span_at_each_kvd(pair: tuple[Host, Host]) -> None:
    here, there = pair
    trace = new_trace(sampled=False)
    with here.engine() as prefill, there.engine():
        grant = open_traced(there, trace)
        assert grant.traceparent == trace.traceparent
        lease = begun(prefill.begin(names(PROMPT), len(PROMPT), grant=grant))
        fill(lease, PROMPT)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        lease.sent.result(PATIENCE_S)
    granted, received = spans_of(there, trace)
    (sent,) = spans_of(here, trace)
    assert [granted.name, received.name, sent.name] == [KVD_GRANT, KVD_RECEIVE, KVD_SEND]
    sent_bytes = SPEC.kv_bytes(len(PROMPT))  # the pages are a little larger
    for span in (granted, received, sent):
        assert span.parent_id == trace.span_id and span.service == "kvd" and not span.error
        assert span.attributes == {
            TRANSFER_ID: grant.transfer_id,
            NBYTES: sent_bytes if span is sent else grant.max_bytes,
            FORM: "canonical",
        }
        assert span.start_s <= span.end_s
    assert granted.kind == "server"
    assert (granted.node, received.node, sent.node) == ("near", "near", "far")
    assert granted.end_s >= received.start_s and sent.start_s >= granted.start_s


def test_a_transfer_that_fails_has_the_reason_at_both_kvds(pair: tuple[Host, Host]) -> None:
    here, there = pair
    trace = new_trace(sampled=False)
    with here.engine() as prefill, there.engine():
        grant = open_traced(there, trace)
        lease = begun(prefill.begin(names(PROMPT), len(PROMPT), grant=grant))
        there.post(f"/v1/transfers/{grant.transfer_id}/abort", AbortTransfer("the client left"))
        assert there.settled(grant)["state"] == "failed"
        wait_until(lambda: spans_of(here, trace) != [])
        lease.abort("ended")
    _, received = spans_of(there, trace)
    (sent,) = spans_of(here, trace)
    assert received.error == "the client left" and "the client left" in sent.error


def test_a_transfer_is_recorded_once(pair: tuple[Host, Host]) -> None:
    """An abort after the commit is no failure of the transfer."""
    here, there = pair
    trace = new_trace(sampled=False)
    with here.engine() as prefill, there.engine():
        grant = open_traced(there, trace)
        lease = begun(prefill.begin(names(PROMPT), len(PROMPT), grant=grant))
        fill(lease, PROMPT)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"
        there.post(f"/v1/transfers/{grant.transfer_id}/abort", AbortTransfer("too late"))
    granted, received = spans_of(there, trace)
    assert (granted.name, received.name, received.error) == (KVD_GRANT, KVD_RECEIVE, "")


def test_a_refused_grant_has_the_reason(pair: tuple[Host, Host]) -> None:
    _, there = pair
    trace = new_trace(sampled=False)
    asked = OpenTransfer(tuple(names(PROMPT)), len(PROMPT), COMPAT)
    status, body = there.post("/v1/open", asked, {TRACEPARENT: trace.traceparent})
    assert status == 200 and isinstance(msgspec.json.decode(body, type=Grant | NotNow), NotNow)
    with there.engine():
        other = msgspec.structs.replace(asked, compat=msgspec.structs.replace(COMPAT, model="x"))
        assert there.post("/v1/open", other, {TRACEPARENT: trace.traceparent})[0] == 409
        assert there.post("/v1/open", {"x": 1}, {TRACEPARENT: trace.traceparent})[0] == 400
    without, unlike, malformed = spans_of(there, trace)
    assert "no engine has registered" in without.error
    assert "does not match" in unlike.error
    assert "not a valid OpenTransfer" in malformed.error


def test_a_copy_of_a_prefix_has_its_transfer_below_it(pair: tuple[Host, Host]) -> None:
    here, there = pair
    trace = new_trace(sampled=False)
    keep(here)
    with there.engine():
        pull = PullPrefix(here.url, tuple(names(PROMPT)))
        status, body = there.post("/v1/pull", pull, {TRACEPARENT: trace.traceparent})
        assert status == 200, body
        wait_until(lambda: spans_of(here, trace) != [])
    received, pulled = spans_of(there, trace)
    (sent,) = spans_of(here, trace)
    assert (pulled.name, pulled.kind, pulled.parent_id) == (KVD_PULL, "server", trace.span_id)
    assert received.name == KVD_RECEIVE and sent.name == KVD_SEND
    assert received.parent_id == sent.parent_id == pulled.span_id
    assert pulled.attributes[NBYTES] == received.attributes[NBYTES]


@pytest.mark.parametrize("text", ["x", "00-" + "0" * 32 + "-" + "1" * 16 + "-01", "y" * 100_000])
def test_a_grant_with_a_trace_that_is_none_is_sent(pair: tuple[Host, Host], text: str) -> None:
    here, there = pair
    with here.engine() as prefill, there.engine():
        grant = msgspec.structs.replace(there.grant(PROMPT), traceparent=text)
        lease = begun(prefill.begin(names(PROMPT), len(PROMPT), grant=grant))
        fill(lease, PROMPT)
        lease.commit()
        assert there.settled(grant)["state"] == "committed"


def test_the_path_needs_the_member_key_and_a_trace_id(tmp_path: Path) -> None:
    key = tmp_path / "key"
    write_secret(key, "k" * 32 + "\n")
    key.chmod(0o600)
    member = SharedKey.read(key)
    trace = new_trace(sampled=False)
    with kvd(tmp_path, member_key=member) as host:
        shown = {"Authorization": "Bearer " + "k" * 32}
        path = TRACES_PATH + trace.trace_id
        assert host.get(path)[0] == 401
        assert host.get(path, shown) == (200, b'{"spans":[]}')
        for other in ("x", "A" * 32, "a" * 33):
            assert host.get(TRACES_PATH + other, shown)[0] == 404


def test_sampled_traces_are_exported(tmp_path: Path) -> None:
    sampled, other = new_trace(sampled=True), new_trace(sampled=False)
    with receiver_thread() as receiver:
        with kvd(tmp_path, node="near", otlp_endpoint=receiver.url) as host, host.engine():
            grants = [open_traced(host, trace) for trace in (sampled, other)]
            assert [spans_of(host, trace)[0].name for trace in (sampled, other)] == [KVD_GRANT] * 2
        # The kvd has sent the rest before it ended; the transfers have failed with it.
        (granted, *_) = receiver.of(sampled.trace_id)
        assert receiver.of(other.trace_id) == []
    assert (granted.name, granted.service, granted.node) == (KVD_GRANT, "prfaas-kvd", "near")
    assert granted.attributes[TRANSFER_ID] == grants[0].transfer_id
