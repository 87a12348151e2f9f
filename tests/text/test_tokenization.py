from __future__ import annotations

import json
from typing import Any

import pytest

from prfaas.errors import InputError
from prfaas.text.tokenization import (
    detokenize,
    parse_detokenize,
    parse_tokenize,
    tokenize,
)
from tests.node.local_api import BYTES

MESSAGES = [{"role": "user", "content": "hi"}]


def tokens_of(**fields: Any) -> Any:
    return tokenize(BYTES, parse_tokenize(json.dumps(fields).encode()), 100)


def text_of(**fields: Any) -> str:
    return detokenize(BYTES, parse_detokenize(json.dumps(fields).encode())).prompt


def test_a_text_and_its_tokens() -> None:
    found = tokens_of(prompt="héllo", model="m")
    assert (found.count, found.max_model_len) == (len(found.tokens), 100)
    assert found.token_strs is None and found.tokens == BYTES.encode("héllo")
    assert text_of(tokens=found.tokens) == "héllo" and text_of(tokens=[]) == ""
    named = tokens_of(prompt="ab", return_token_strs=True)
    assert named.token_strs == ["a", "b"]


def test_a_conversation_with_the_fields_of_a_chat() -> None:
    plain = tokens_of(messages=MESSAGES)
    assert text_of(tokens=plain.tokens).count("hi") == 1
    without = tokens_of(messages=MESSAGES, add_generation_prompt=False, return_token_strs=True)
    assert without.count < plain.count and len(without.token_strs) == without.count
    assert tokens_of(messages=MESSAGES, chat_template=None, media_io_kwargs={}) == plain


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a"]}, "prompt"),
        ({"prompt": "a", "unheard_of": None}, "unheard_of"),
        ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
        ({"messages": []}, "messages"),
        ({"messages": MESSAGES, "unheard_of": 1}, "unheard_of"),
        ({"messages": MESSAGES, "chat_template": "x"}, "chat_template"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
def test_an_error_names_the_field(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as refused:
        tokens_of(**fields)
    assert refused.value.where == where


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({}, "tokens"),
        ({"tokens": "a"}, "tokens"),
        ({"tokens": [1, -1]}, "tokens[1]"),
        ({"tokens": [1, 2**32]}, "tokens[1]"),
        ({"tokens": [1, 10**6]}, "tokens"),
        ({"tokens": [1], "unheard_of": 1}, "unheard_of"),
    ],
)
def test_an_error_of_detokenize_names_the_field(fields: dict[str, Any], where: str) -> None:
    with pytest.raises(InputError) as refused:
        text_of(**fields)
    assert (refused.value.where or "tokens") == where


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b'{"prompt": "\xff"}'])
def test_what_is_not_json_is_refused(body: bytes) -> None:
    for parse in (parse_tokenize, parse_detokenize):
        with pytest.raises(InputError):
            parse(body)


def test_without_a_tokenizer_the_error_says_so() -> None:
    for fields in ({"prompt": "a"}, {"messages": MESSAGES}):
        with pytest.raises(InputError, match="no tokenizer"):
            tokenize(None, parse_tokenize(json.dumps(fields).encode()), 100)
    with pytest.raises(InputError, match="no tokenizer"):
        detokenize(None, parse_detokenize(b'{"tokens": [1]}'))
