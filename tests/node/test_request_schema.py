from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from prfaas.contracts.kv_transfer_params import RemoteDecode, RemotePrefill, decode
from prfaas.engine.api import Sampling
from prfaas.errors import InputError
from prfaas.node.request_schema import Completion, TextCompletion, parse_completion
from prfaas.types import Grant, TransferId

GRANT = Grant(TransferId("t-1"), "secret", "127.0.0.1:1", {"full0": 64}, 1000, 5.0)


def parse_all(**fields: Any) -> TextCompletion:
    return parse_completion(json.dumps({"prompt": [1, 2, 3], **fields}).encode())


def parse(**fields: Any) -> Completion:
    return parse_all(**fields).asked


def test_defaults_are_vllms() -> None:
    asked = parse()
    assert asked.sampling(16) == Sampling(max_tokens=16, temperature=1.0)
    assert not asked.stream and asked.stops == ()
    assert list(parse_all().prompt) == [1, 2, 3]


def test_every_field_reaches_the_engine() -> None:
    asked = parse(
        max_tokens=3, temperature=0.5, top_p=0.9, seed=7, stop_token_ids=[2], ignore_eos=True
    )
    assert asked.sampling(16) == Sampling(3, 0.5, 0.9, 7, frozenset({2}), True)


def test_null_is_absence() -> None:
    asked = parse(max_tokens=None, temperature=None, stop=None, n=None, logprobs=None)
    assert asked.sampling(16) == Sampling(max_tokens=16, temperature=1.0)


@pytest.mark.parametrize(
    ("prompt", "only"),
    [
        ("text", "text"),
        (["text"], "text"),
        ([1, 2**32 - 1], [1, 2**32 - 1]),
        ([[4, 5]], [4, 5]),
        ([], []),
    ],
)
def test_prompts_come_in_four_shapes(prompt: Any, only: Any) -> None:
    found = parse_all(prompt=prompt).prompt
    assert (found if isinstance(found, str) else found.tolist()) == only


@pytest.mark.parametrize("text", ["[ 5 ,\n6\t]", "[0]", "[" + ",".join(["4294967295"] * 99) + "]"])
def test_token_ids_are_read_as_json_reads_them(text: str) -> None:
    parsed = parse_completion(b'{"prompt": ' + text.encode() + b"}")
    assert list(parsed.prompt) == json.loads(text)


@pytest.mark.parametrize("text", ["[007]", "[1,]", "[1 2]", "[4294967296]", "[" + "9" * 40 + "]"])
def test_what_is_no_list_of_token_ids(text: str) -> None:
    with pytest.raises(InputError):
        parse_completion(b'{"prompt": ' + text.encode() + b"}")


def test_the_last_prompt_of_a_body_counts() -> None:
    parsed = parse_completion(b'{"prompt": "text", "max_tokens": 1, "prompt": [7]}')
    assert list(parsed.prompt) == [7] and parsed.asked.max_tokens == 1


def test_fields_nobody_knows_are_skipped() -> None:
    assert list(parse_all(user="somebody", priority=3).prompt) == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 2**32]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"logprobs": 1}, "logprobs"),
        ({"echo": True}, "echo"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"kv_transfer_params": {"grant": {"type": "grant"}}}, "kv_transfer_params.grant"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(**fields)
    assert where in str(caught.value)


def test_several_prompts_are_refused() -> None:
    with pytest.raises(InputError, match="2 prompts"):
        parse(prompt=["a", "b"])


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"{}", b"\xff"])
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(InputError):
        parse_completion(body)


# Transfers ----------------------------------------------------------------------------------------


def transfer(prompt_tokens: int = 100, **params: Any) -> Any:
    return decode(parse(kv_transfer_params=params).kv_transfer_params, prompt_tokens)


def test_both_halves_of_a_hand_off() -> None:
    grant = msgspec.to_builtins(GRANT)
    half = transfer(do_remote_decode=True, grant=grant, handoff_tokens=64)
    assert half == RemoteDecode(GRANT, 64)
    assert transfer(do_remote_decode=True, grant=grant) == RemoteDecode(GRANT, 100)
    assert transfer(do_remote_prefill=True, transfer_id="t-1") == RemotePrefill(TransferId("t-1"))
    assert transfer() is None
    assert transfer(do_remote_decode=False, do_remote_prefill=False) is None


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True},
        {"do_remote_prefill": True},
        {"do_remote_prefill": True, "do_remote_decode": True, "transfer_id": "t"},
        {"do_remote_decode": True, "grant": msgspec.to_builtins(GRANT), "handoff_tokens": 0},
        {"do_remote_decode": True, "grant": msgspec.to_builtins(GRANT), "handoff_tokens": 101},
    ],
)
def test_half_a_hand_off_that_cannot_be(params: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="kv_transfer_params"):
        transfer(**params)
