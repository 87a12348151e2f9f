"""Messages recorded before the contracts had a home decode and re-encode byte for byte.

Each file in `recorded/` has one message per line. Frames are in hexadecimal.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from prfaas.cache.lease import Occupancy as CacheOccupancy
from prfaas.cache.lease import PoolStats
from prfaas.contracts import kv_transfer_params, kvd_api
from prfaas.contracts.kv_transfer_params import RequestParams, ResponseParams
from prfaas.kvd.engine_socket.messages import (
    FrameReader,
    SegmentName,
    decode_answer,
    decode_call,
    frame,
)
from prfaas.transport import messages as bodies
from prfaas.transport import wire
from prfaas.transport.receiver import ReceiverStats
from prfaas.transport.wire import HEADER_BYTES, PIECE_BYTES, Kind
from prfaas.types import Compat, Grant, NotNow

RECORDED = Path(__file__).parent / "recorded"
PROMPT_TOKENS = 100_000  # longer than every recorded hand-off

KVD_API: dict[str, Any] = {
    "POST /v1/open request": kvd_api.OpenTransfer,
    "POST /v1/open response": Grant | NotNow,
    "GET /v1/transfers/ID response": kvd_api.TransferStatus,
    "POST /v1/transfers/ID/abort request": kvd_api.AbortTransfer,
    "POST /v1/match request": kvd_api.MatchPrefix,
    "POST /v1/match response": kvd_api.PrefixMatch,
    "POST /v1/pull request": kvd_api.PullPrefix,
    "POST /v1/pull response": kvd_api.PrefixPulled | NotNow,
    "POST /v1/push request": kvd_api.PushPrefix,
    "POST /v1/push response": kvd_api.PushStarted | NotNow,
    "GET /v1/stats response": kvd_api.KvdReport,
    "GET /v1/events response": kvd_api.EventPage,
    "POST /v1/role request": kvd_api.SetRole,
    "POST /v1/role response": kvd_api.Role,
    "POST /v1/planning request": kvd_api.ClaimPlanning,
    "POST /v1/planning response": kvd_api.PlanningLease,
    "POST /v1/records request": kvd_api.PutRecord,
    "POST /v1/records response": kvd_api.RecordPut,
    "GET /v1/records response": kvd_api.PlanningRecord,
    "POST /prfaas/v1/register request": kvd_api.Heartbeat,
    "error response": kvd_api.KvdErrorBody,
}
# Fields whose keys are data.
MAPPINGS = ("skip_tokens", "incoming", "outgoing", "next_seq", "bytes_by_group", "snapshot")
FRAME_BODIES: dict[Kind, Any] = {
    Kind.HELLO: bodies.Hello,
    Kind.WELCOME: bodies.Hello,
    Kind.OPEN: bodies.Manifest,
    Kind.NACK: bodies.Reason,
    Kind.ABORT: bodies.Reason,
    Kind.ENDED: bodies.Ended,
}


def recorded(name: str) -> list[Any]:
    lines = (RECORDED / name).read_text(encoding="utf-8").splitlines()
    messages = [json.loads(line) for line in lines]
    return [
        pytest.param(
            tuple(message.values()), id=f"{number}-{'-'.join(list(message.values())[:-1])}"
        )
        for number, message in enumerate(messages)
    ]


@pytest.mark.parametrize("message", recorded("kvd_api.jsonl"))
def test_kvd_api(message: tuple[str, str]) -> None:
    name, text = message
    body = text.encode()
    assert msgspec.json.encode(msgspec.json.decode(body, type=KVD_API[name])) == body


@pytest.mark.parametrize("message", recorded("kvd_api.jsonl"))
def test_fields_of_a_later_version_are_ignored(message: tuple[str, str]) -> None:
    """Services of two versions work together while a deployment is upgraded."""
    name, text = message
    later = json.dumps(_with_more_fields(json.loads(text)))
    assert "of_a_later_version" in later
    decoded = msgspec.json.decode(later, type=KVD_API[name])
    assert decoded == msgspec.json.decode(text, type=KVD_API[name])


def _with_more_fields(value: Any, field: str = "") -> Any:
    """Every object has a field more, except the mappings and `Compat`."""
    if isinstance(value, list):
        return [_with_more_fields(one) for one in value]
    if not isinstance(value, dict) or field in (*MAPPINGS, "compat"):
        return value
    known = {name: _with_more_fields(one, name) for name, one in value.items()}
    return {**known, "of_a_later_version": {"some": ["value", None]}}


def test_a_compatibility_field_of_a_later_version_is_refused() -> None:
    """Two engines that differ in it would exchange state that neither can use."""
    fields = {"model": "m", "revision": "1", "kv_dtype": "f", "state_dtype": "f"}
    known = {**fields, "block_tokens": 16, "layout": "canonical"}
    assert msgspec.convert(known, Compat).tensor_parallel == 1
    with pytest.raises(msgspec.ValidationError, match="of_a_later_version"):
        msgspec.convert({**known, "of_a_later_version": 1}, Compat)


def test_every_body_of_the_kvd_api_is_recorded() -> None:
    lines = (RECORDED / "kvd_api.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["message"] for line in lines} == set(KVD_API)


@pytest.mark.parametrize("message", recorded("kv_transfer_params.jsonl"))
def test_kv_transfer_params(message: tuple[str, str]) -> None:
    name, text = message
    body = text.encode()
    if name.endswith("response"):
        response = msgspec.json.decode(body, type=ResponseParams)
        assert msgspec.json.encode(response) == body
        assert msgspec.json.encode(kv_transfer_params.encode(response)) == body
        return
    if "reference" in name:
        reference = kv_transfer_params.decode_reference(
            msgspec.json.decode(body, type=RequestParams)
        )
        assert reference is not None
        assert msgspec.json.encode(kv_transfer_params.encode(reference)) == body
        return
    for params in (msgspec.json.decode(body, type=RequestParams), json.loads(body)):
        half = kv_transfer_params.decode(params, PROMPT_TOKENS)
        assert half is not None
        assert msgspec.json.encode(kv_transfer_params.encode(half)) == body


@pytest.mark.parametrize("message", recorded("engine_socket.jsonl"))
def test_engine_socket(message: tuple[str, str, str]) -> None:
    direction, _, text = message
    data = bytes.fromhex(text)
    (body,) = FrameReader().feed(data)
    decode = decode_call if direction == "engine to kvd" else decode_answer
    assert frame(decode(body)) == data


def test_values_of_a_later_version_at_the_end_of_an_array_are_ignored() -> None:
    shape = kvd_api.GroupShape("full", "full0", (0,), 8, heads=4)
    later = [*msgspec.json.decode(msgspec.json.encode(shape)), "of a later version", 1]
    assert msgspec.convert(later, kvd_api.GroupShape) == shape
    segment = SegmentName("full0", 0, 0, 4, 2, 2)
    encoded = msgspec.msgpack.encode([*msgspec.to_builtins(segment), {"more": 1}])
    assert msgspec.msgpack.decode(encoded, type=SegmentName) == segment


@pytest.mark.parametrize("message", recorded("frames.jsonl"))
def test_wire_frames(message: tuple[str, str]) -> None:
    name, text = message
    data = bytes.fromhex(text)
    header = wire.parse_header(data)
    body = data[HEADER_BYTES:]
    assert header.kind is Kind[name] and header.body_bytes == len(body)
    envelope = {"sequence": header.sequence, "transfer_id": header.transfer_id}
    if header.kind is Kind.DATA:
        table = body[: header.pieces * PIECE_BYTES]
        payload = body[len(table) :]
        pieces = wire.parse_table(table, header)
        assert wire.intact(data[:HEADER_BYTES], header, table, [payload])
        head = wire.encode_data(
            pieces, [payload], auth=header.auth, checked=bool(header.flags), **envelope
        )
        assert bytes(head) + payload == data
        return
    assert wire.intact(data[:HEADER_BYTES], header, body)
    kind = FRAME_BODIES.get(header.kind)
    if kind is not None:
        body = bodies.encode(bodies.decode(body, kind))
    elif header.kind is Kind.ACK:
        body = wire.encode_sequences(wire.parse_sequences(body))
    elif header.kind is Kind.PROGRESS:
        body = wire.encode_progress(wire.parse_progress(body))
    assert wire.encode_message(header.kind, body, auth=header.auth, **envelope) == data


def test_every_kind_of_frame_is_recorded() -> None:
    lines = (RECORDED / "frames.jsonl").read_text(encoding="utf-8").splitlines()
    assert {json.loads(line)["kind"] for line in lines} == {kind.name for kind in Kind}


@pytest.mark.parametrize(
    ("contract", "source"),
    [
        (kvd_api.Occupancy, CacheOccupancy),
        (kvd_api.PoolCounters, PoolStats),
        (kvd_api.ArrivalCounters, ReceiverStats),
    ],
)
def test_a_report_has_every_count_of_its_source(
    contract: type[msgspec.Struct], source: type[Any]
) -> None:
    assert contract.__struct_fields__ == tuple(source.__slots__)
