from __future__ import annotations

from typing import Any

import msgspec
import pytest

from prfaas.contracts.kv_transfer_params import (
    Reference,
    Remainder,
    RemoteDecode,
    RemotePrefill,
    RequestParams,
    ResponseParams,
    decode,
    decode_reference,
    decode_remainder,
    encode,
    prefill_error,
)
from prfaas.contracts.openai import MAX_CHOICES
from prfaas.errors import InputError
from prfaas.types import Grant, TransferId

GRANT = Grant(TransferId("t-1"), "secret", "127.0.0.1:1", {"full0": 64}, 1000, 5.0)
RAW_GRANT = msgspec.to_builtins(GRANT)


def test_a_request_asks_for_one_half_of_a_hand_off() -> None:
    prefill = {"do_remote_decode": True, "grant": RAW_GRANT}
    assert decode({**prefill, "handoff_tokens": 64}, 100) == RemoteDecode(GRANT, 64)
    assert decode(prefill, 100) == RemoteDecode(GRANT, 100)
    assert decode({**prefill, "handoff_tokens": None}, 100) == RemoteDecode(GRANT, 100)
    transfer = {"do_remote_prefill": True, "transfer_id": "t-1"}
    assert decode(transfer, 100) == RemotePrefill(TransferId("t-1"))


@pytest.mark.parametrize("params", [None, {}, {"do_remote_decode": False}, {"grant": "ignored"}])
def test_without_a_flag_there_is_no_hand_off(params: dict[str, Any] | None) -> None:
    assert decode(params, 100) is None


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"do_remote_decode": True}, "grant is missing"),
        ({"do_remote_decode": True, "grant": {"type": "grant"}}, "transfer_id"),
        ({"do_remote_prefill": True}, "transfer_id is missing"),
        ({"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "t"}, "both set"),
        ({"do_remote_decode": True, "grant": RAW_GRANT, "handoff_tokens": 0}, "handoff_tokens"),
        ({"do_remote_decode": True, "grant": RAW_GRANT, "handoff_tokens": 101}, "handoff_tokens"),
    ],
)
def test_a_bad_request_names_the_problem(params: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=f"kv_transfer_params.*{problem}"):
        decode(params, 100)


def test_a_refused_prefill_carries_its_error() -> None:
    encoded = encode(prefill_error("overloaded", "no page is free", 2.0))
    assert encoded == {
        "do_remote_prefill": False,
        "error": {"code": "overloaded", "message": "no page is free", "retry_after_s": 2.0},
    }
    assert msgspec.convert(encoded, ResponseParams).error is not None


def test_a_reference_is_no_half_of_a_hand_off() -> None:
    sent = encode(Reference((3, 9)))
    assert sent == {"do_reference": True, "cut_tokens": (3, 9)}
    assert decode_reference(msgspec.convert(sent, RequestParams)) == Reference((3, 9))
    assert decode(sent, 100) is None  # the vLLM connector ignores it
    assert decode_reference(RequestParams(do_reference=True)) == Reference()
    for ignored in (None, RequestParams(), RequestParams(cut_tokens=(3,))):
        assert decode_reference(ignored) is None
    both = RequestParams(do_reference=True, do_remote_prefill=True, transfer_id="t")
    with pytest.raises(InputError, match="do_reference is set together"):
        decode_reference(both)


def test_a_remainder_has_its_bounds() -> None:
    sent = encode(Remainder(2048, 512))
    assert sent == {"do_remainder": True, "max_computed_tokens": 2048, "chunk_tokens": 512}
    assert decode_remainder(msgspec.convert(sent, RequestParams)) == Remainder(2048, 512)
    assert decode(sent, 10) is None  # other engines ignore it
    assert decode_remainder(RequestParams(chunk_tokens=512)) is None
    with pytest.raises(InputError, match="max_computed_tokens is missing"):
        decode_remainder(RequestParams(do_remainder=True, chunk_tokens=512))
    with pytest.raises(InputError, match="another kind"):
        decode_remainder(RequestParams(do_remainder=True, do_reference=True))


def test_both_halves_ask_for_the_cuts() -> None:
    for half in (RemoteDecode(GRANT, 64, True), RemotePrefill(TransferId("t-1"), None, True)):
        assert encode(half)["report_cuts"] is True
        assert decode(encode(half), 100) == half
    assert "report_cuts" not in encode(RemoteDecode(GRANT, 64))
    assert encode(ResponseParams(cut_tokens=(8, 16))) == {"cut_tokens": (8, 16)}


def test_a_transfer_is_attached_once_unless_declared_otherwise() -> None:
    once, often = RemotePrefill(TransferId("t-1")), RemotePrefill(TransferId("t-1"), attachments=4)
    assert "attachments" not in encode(once)
    assert decode(encode(often), 100) == often
    for wrong in (0, MAX_CHOICES + 1):
        with pytest.raises(InputError, match="kv_transfer_params.attachments"):
            decode({**encode(once), "attachments": wrong}, 100)
