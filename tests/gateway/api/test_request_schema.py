from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from prfaas.errors import InputError
from prfaas.gateway.api.request_schema import (
    ParsedRequest,
    check_values,
    parse_chat,
    parse_completion,
    parse_either,
)
from prfaas.gateway.client.request_body import encode_body
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.text import Chat
from tests.gateway.api.api_server import joined

MESSAGES = [{"role": "user", "content": "hi"}]
CHAT_JSON = f'"messages":{json.dumps(MESSAGES)}'


def ids_of(prompt: Any) -> list[int]:
    assert isinstance(prompt, TokenIds)
    ids: list[int] = prompt.array.tolist()
    return ids


def completion(**fields: Any) -> ParsedRequest:
    return parse_completion(json.dumps({"prompt": [1, 2, 3], **fields}).encode())


def forwarded(parsed: ParsedRequest) -> Any:
    """The fields as the decode engine reads them."""
    return msgspec.json.decode(joined(encode_body(parsed.fields)))


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("text", ["text"]),
        ([4, 5], [[4, 5]]),
        (["text"], ["text"]),
        ([[4, 5]], [[4, 5]]),
        (["a", "b"], ["a", "b"]),
        ([[4, 5], [6]], [[4, 5], [6]]),
    ],
)
def test_prompts_come_in_six_shapes(prompt: Any, expected: Any) -> None:
    found = completion(prompt=prompt).prompts
    assert [one if isinstance(one, str) else ids_of(one) for one in found] == expected


def test_fields_that_are_not_checked_are_forwarded_unchanged() -> None:
    fields = {
        "logit_bias": {"5": -1.5},
        "x": [None, {"y": "é"}],
        "temperature": 0.25,
        "stop": ["a"],
    }
    assert forwarded(completion(**fields)) == fields
    chat = {"messages": MESSAGES, "tools": [{"type": "function"}], "reasoning_effort": "low"}
    parsed = parse_chat(
        json.dumps({**chat, "cache_salt": "s", "kv_transfer_params": None}).encode()
    )
    assert forwarded(parsed) == chat and isinstance(parsed.prompts[0], Chat)
    assert parsed.options.cache_salt == "s"


def test_streams_always_request_usage_from_the_engine() -> None:
    both = {"include_usage": True, "continuous_usage_stats": True}
    assert completion(stream=True, stream_options=both).fields["stream_options"] == both
    parsed = completion(stream=True, stream_options={**both, "include_usage": False})
    assert parsed.fields["stream_options"] == {"include_usage": True}
    assert not parsed.options.shows_usage
    assert completion(stream=True).fields["stream_options"] == {"include_usage": True}
    assert completion(stream=True, stream_options={"include_usage": True}).options.shows_usage
    assert "stream_options" not in completion().fields


def test_prompt_logprobs_are_recognised_in_both_spellings() -> None:
    assert completion(prompt_logprobs=0).prompt_logprobs
    assert completion(echo=True, logprobs=1).prompt_logprobs
    assert not completion(echo=True).prompt_logprobs and not completion(logprobs=1).prompt_logprobs


def test_the_output_limit_has_two_names() -> None:
    for fields, limit in (
        ({"max_tokens": 5}, 5),
        ({"max_completion_tokens": 4, "max_tokens": 5}, 4),
        ({}, None),
    ):
        parsed = parse_either(json.dumps({"messages": MESSAGES, **fields}).encode())
        assert parsed.options.limit_tokens == limit


def test_the_last_of_two_equal_fields_counts() -> None:
    parsed = parse_completion(b'{"prompt": [1], "max_tokens": 1, "prompt": [2], "max_tokens": 2}')
    assert ids_of(parsed.prompts[0]) == [2] and forwarded(parsed) == {"max_tokens": 2}


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, -1]}, "prompt[1]"),
        ({"prompt": [1, 2**31]}, "prompt[1]"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": [[1], [2, -1]]}, "prompt[1].[1]"),
        ({"prompt": ["a", 1]}, "prompt[1]"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": ["a"] * 256, "n": 3}, "n"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": "a" * 1025}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"model": 5}, "model"),
    ],
)
def test_an_error_names_the_invalid_field(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as refused:
        completion(**fields)
    assert refused.value.where == where


def peak_bytes(parse: Callable[[bytes], object], body: bytes) -> int:
    """The memory that Python objects take at most while the body is parsed."""
    tracemalloc.start()
    try:
        parse(body)
    except InputError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize(
    "value",
    [f"[{','.join(['[]'] * 300_000)}]", json.dumps({f"k{n}": n for n in range(100_000)})],
    ids=["lists", "keys"],
)
def test_fields_that_the_gateway_does_not_read_stay_bytes(value: str) -> None:
    for parse, prompt in ((parse_completion, '"prompt":[1]'), (parse_chat, CHAT_JSON)):
        body = f'{{{prompt},"unknown":{value}}}'.encode()
        assert peak_bytes(parse, body) < 4 * len(body)


def test_fields_beside_the_prompt_are_bounded() -> None:
    with pytest.raises(InputError, match="more than 1048576") as refused:
        completion(logit_bias={str(n): 1.0 for n in range(200_000)})
    assert refused.value.where == "logit_bias"
    long = "x" * (2 << 20)
    assert len(str(completion(prompt=long).prompts[0])) == len(long)
    tools = [{"type": "function", "function": {"description": long}}]
    body = json.dumps({"messages": [{"role": "user", "content": long}], "tools": tools}).encode()
    assert isinstance(parse_chat(body).prompts[0], Chat)


def test_a_field_that_is_not_utf_8_is_named() -> None:
    with pytest.raises(InputError, match="not UTF-8") as refused:
        parse_completion(b'{"prompt": [1], "user": "\xff"}')
    assert refused.value.where == "user"


def test_a_body_with_more_values_than_the_context_has_tokens_is_refused_before_it_is_parsed() -> (
    None
):
    body = b'{"messages":[{"role":"user","content":[%s{}]}]}' % (b"{}," * 600_000)
    with pytest.raises(InputError, match="brackets and commas"):
        check_values(body, 100_000)
    check_values(json.dumps({"prompt": list(range(100_000))}).encode(), 100_000)


def test_each_prompt_of_a_list_may_have_as_many_values_as_the_context() -> None:
    ids = ",".join(["7"] * 90_000)
    check_values(f'{{"prompt": [[{ids}], [{ids}]]}}'.encode(), 10_000)
    for several in (
        f"{ids},{ids}",  # one prompt
        f"[{ids}],{ids}",  # not a list of prompts
        f'["a"],[{ids},{ids}]',
        ",".join(["[7]"] * 150_000),  # too many prompts
    ):
        with pytest.raises(InputError, match="brackets and commas"):
            check_values(f'{{"prompt": [{several}]}}'.encode(), 10_000)


def test_the_prompts_of_a_list_become_arrays() -> None:
    body = b'{"prompt": [%s[1]]}' % (b"[%s1]," % (b"1234567," * 50_000) * 4)
    assert peak_bytes(parse_completion, body) < 8 * len(body)
