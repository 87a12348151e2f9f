from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
import pytest

from prfaas.contracts.kv_transfer_params import RemoteDecode, RemotePrefill, decode
from prfaas.engine.api import Sampling
from prfaas.errors import InputError
from prfaas.node.known_fields import FIXED_IN_CHAT, FIXED_IN_COMPLETIONS, WITHOUT_EFFECT
from prfaas.node.request_schema import (
    MAX_LISTED_TOKENS,
    ChatOptions,
    Completion,
    TextCompletion,
    check_values,
    parse_chat,
    parse_completion,
)
from prfaas.types import Grant, TransferId

GRANT = Grant(TransferId("t-1"), "secret", "127.0.0.1:1", {"full0": 64}, 1000, 5.0)


def parse_all(**fields: Any) -> TextCompletion:
    return parse_completion(json.dumps({"prompt": [1, 2, 3], **fields}).encode())


def parse(**fields: Any) -> Completion:
    return parse_all(**fields).asked


def chat(**fields: Any) -> ChatOptions:
    messages = [{"role": "user", "content": "a"}]
    return parse_chat(json.dumps({"messages": messages, **fields}).encode()).asked


def test_defaults_are_vllms() -> None:
    asked = parse()
    assert asked.sampling(16) == Sampling(max_tokens=16, temperature=1.0)
    assert not asked.stream and asked.stops == ()
    assert list(map(list, parse_all().prompts)) == [[1, 2, 3]]


def test_every_field_reaches_the_engine() -> None:
    asked = parse(
        max_tokens=3, temperature=0.5, top_p=0.9, seed=7, stop_token_ids=[2], ignore_eos=True
    )
    assert asked.sampling(16) == Sampling(3, 0.5, 0.9, 7, frozenset({2}), True)
    asked = parse(
        **{"top_k": 5, "min_p": 0.1, "min_tokens": 2, "presence_penalty": 0.5, "logprobs": 3},
        **{"frequency_penalty": -0.5, "repetition_penalty": 1.1, "allowed_token_ids": [4, 4, 5]},
        logit_bias={"7": 300, "8": -1.5},
    )
    assert asked.sampling(16, [[1, 2]]) == Sampling(
        **{"max_tokens": 16, "temperature": 1.0, "top_k": 5, "min_p": 0.1, "min_tokens": 2},
        **{"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.1},
        logit_bias={7: 100.0, 8: -1.5},
        bad_words_token_ids=((1, 2),),
        allowed_token_ids=frozenset({4, 5}),
        logprobs=3,
    )
    assert parse(top_k=-1).sampling(16).top_k == 0


def test_a_chat_counts_alternatives_with_top_logprobs() -> None:
    assert chat().sampling(16).logprobs is None
    assert chat(logprobs=True).sampling(16).logprobs == 0
    assert chat(logprobs=True, top_logprobs=4).sampling(16).logprobs == 4
    assert chat(logprobs=False, top_logprobs=0).sampling(16).logprobs is None


def test_null_is_absence() -> None:
    asked = parse(
        **dict.fromkeys(("max_tokens", "temperature", "stop", "n", "logprobs", "top_k", "min_p")),
        **dict.fromkeys(("logit_bias", "presence_penalty", "bad_words", "echo", "guided_json")),
    )
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
    (found,) = parse_all(prompt=prompt).prompts
    assert (found if isinstance(found, str) else found.tolist()) == only


@pytest.mark.parametrize("text", ["[ 5 ,\n6\t]", "[0]", "[" + ",".join(["4294967295"] * 99) + "]"])
def test_token_ids_are_read_as_json_reads_them(text: str) -> None:
    parsed = parse_completion(b'{"prompt": ' + text.encode() + b"}")
    (found,) = parsed.prompts
    assert list(found) == json.loads(text)


@pytest.mark.parametrize("text", ["[007]", "[1,]", "[1 2]", "[4294967296]", "[" + "9" * 40 + "]"])
def test_what_is_no_list_of_token_ids(text: str) -> None:
    with pytest.raises(InputError):
        parse_completion(b'{"prompt": ' + text.encode() + b"}")


def test_the_last_prompt_of_a_body_counts() -> None:
    parsed = parse_completion(b'{"prompt": "text", "max_tokens": 1, "prompt": [7]}')
    (found,) = parsed.prompts
    assert list(found) == [7] and parsed.asked.max_tokens == 1


# What a client may send besides the fields that are served: a value that asks for something.
UNSERVED: dict[str, Any] = {
    **{"best_of": 2, "use_beam_search": True, "length_penalty": 2.0},
    **{"logprob_token_ids": [1], "logits_processors": ["x"]},
    **{"guided_json": {}, "guided_regex": "a", "guided_choice": ["a"], "guided_grammar": "a"},
    **{"guided_json_object": True, "guided_decoding_backend": "a"},
    **{"guided_whitespace_pattern": "a", "structural_tag": "a", "early_stopping": True},
    **{"spaces_between_special_tokens": False, "truncate_prompt_tokens": 1},
    **{"truncation_side": "left", "repetition_detection": {"min_count": 2}},
    **{"thinking_token_budget": 5, "watermarking": True, "priority": 1, "store": True},
    **{"service_tier": "flex", "stream_interval": 2, "return_token_offsets": True},
    **{"routed_experts_prompt_start": 1, "mm_payload": "other", "return_mm_kwargs": True},
    **{"mm_processor_kwargs": {"a": 1}, "media_io_kwargs": {"a": {}}, "vllm_xargs": {"a": 1}},
    **{"ec_transfer_params": {"a": 1}, "custom_params": {"a": 1}},
}
OF_COMPLETIONS = {"suffix": "a", "prompt_embeds": "a"}
OF_CHATS = {
    **{"echo": True, "functions": [{}], "function_call": {"name": "a"}},
    **{"chat_template": "a", "chat_template_content_format": "string"},
    **{"include_reasoning": False, "return_prompt_text": True, "modalities": ["audio"]},
    **{"audio": {}, "prediction": {}, "verbosity": "low", "web_search_options": {}},
}


def test_every_field_that_is_not_served_is_refused_by_its_name() -> None:
    for parsed, unserved, fixed in (
        (parse, UNSERVED | OF_COMPLETIONS, FIXED_IN_COMPLETIONS),
        (chat, UNSERVED | OF_CHATS, FIXED_IN_CHAT),
    ):
        assert unserved.keys() == fixed.keys()
        for field, value in {**unserved, "unheard_of": 1, "": None}.items():
            with pytest.raises(InputError) as caught:
                parsed(**{field: value})
            assert caught.value.where == field
        for field, values in fixed.items():
            for value in (None, *values):
                parsed(**{field: value})


def test_fields_without_effect_are_accepted() -> None:
    given = dict.fromkeys(WITHOUT_EFFECT, "a")
    assert parse(**given) == parse() and chat(**given) == chat()


def test_fields_of_one_endpoint_are_refused_by_the_other() -> None:
    for parsed, fields in ((parse, ("messages", "tools", "top_logprobs")), (chat, ("suffix",))):
        for field in fields:
            with pytest.raises(InputError) as caught:
                parsed(**{field: 1})
            assert caught.value.where == field


@pytest.mark.parametrize("option", ["include_obfuscation", "other"])
def test_stream_options_are_checked_too(option: str) -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).stream_options is not None
    with pytest.raises(InputError) as caught:
        parse(stream=True, stream_options={option: True})
    assert caught.value.where == f"stream_options.{option}"


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, 2**32]}, "prompt"),
        ({"prompt": [1, 2.5]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"n": 1.5}, "n"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"n": 64, "prompt": ["a"] * 9}, "n"),
        ({"n": 2, "kv_transfer_params": {"do_remote_decode": True}}, "n"),
        ({"prompt": ["a"] * 257}, "prompt"),
        ({"prompt": [[1]] * 257}, "prompt"),
        ({"prompt": ["a", [1]]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": [[1], 1]}, "prompt"),
        ({"prompt": [[[1]]]}, "prompt"),
        ({"prompt": [[1, 2**32]]}, "prompt"),
        ({"prompt": ["a", "b"], "kv_transfer_params": {"do_reference": True}}, "prompt"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "kv_transfer_params": {"do_remainder": True}}, "prompt_logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"presence_penalty": "much"}, "presence_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 0.5}, "top_k"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {str(n): 1 for n in range(301)}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a"] * 129}, "bad_words"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", "b" * 1025]}, "stop"),
        ({"kv_transfer_params": {"grant": {"type": "grant"}}}, "kv_transfer_params.grant"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(**fields).sampling(16)
    assert where in str(caught.value)


@pytest.mark.parametrize("fields", [{"top_logprobs": 2}, {"top_logprobs": 21, "logprobs": True}])
def test_alternatives_of_chats_have_limits(fields: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        chat(**fields)
    assert caught.value.where == "top_logprobs"


def test_several_prompts_are_texts_or_lists_of_token_ids() -> None:
    assert parse_all(prompt=["a", "b"]).prompts == ["a", "b"]
    lists = [[1, 2], [], [2**32 - 1]]
    assert [list(ids) for ids in parse_all(prompt=lists).prompts] == lists
    found = parse_completion(b'{"prompt": [ [1 , 2],\n[ 3]\t] , "n": 2}')
    assert [list(ids) for ids in found.prompts] == [[1, 2], [3]]
    assert all(isinstance(ids, array) for ids in found.prompts)
    assert found.asked.continuations == 2 and parse(n=None).continuations == 1


def test_prompts_together_may_be_longer_than_one() -> None:
    body = json.dumps({"prompt": [[1] * 1000] * 200}).encode()
    check_values(body, 2048, MAX_LISTED_TOKENS)
    with pytest.raises(InputError, match="brackets and commas"):
        check_values(body, 2048)
    with pytest.raises(InputError, match="fewer prompts"):
        check_values(b"," * (MAX_LISTED_TOKENS + 200_000), 2048, MAX_LISTED_TOKENS)


def test_echo_with_logprobs_asks_for_those_of_the_prompt() -> None:
    assert parse(echo=True, logprobs=2).prompt_logprobs_count == 2
    assert parse(echo=True, logprobs=2, prompt_logprobs=0).prompt_logprobs_count == 0
    assert parse(echo=True).prompt_logprobs_count is None
    assert parse(logprobs=2).prompt_logprobs_count is None


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
