from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats

from prfaas.contracts.openai_fields import (
    OPENAI,
    OTHER,
    REFUSED_BY_GATEWAY,
    VLLM,
    WITHOUT_EFFECT,
    Endpoint,
    known_fields,
    passed_to_vllm,
)


@pytest.mark.parametrize(("endpoint", "module"), [("completions", completions), ("chat", chats)])
def test_the_fields_of_openai_are_those_of_its_client(endpoint: Endpoint, module: Any) -> None:
    both = (
        module.CompletionCreateParamsNonStreaming,
        module.CompletionCreateParamsStreaming,
    )
    assert {name for params in both for name in get_type_hints(params)} == OPENAI[endpoint]


def test_the_lists_agree() -> None:
    everywhere = known_fields("completions") | known_fields("chat")
    assert everywhere >= REFUSED_BY_GATEWAY.keys() | WITHOUT_EFFECT
    for endpoint in ("completions", "chat"):
        assert not OTHER & (OPENAI[endpoint] | VLLM[endpoint])
        assert passed_to_vllm(endpoint) <= known_fields(endpoint)
