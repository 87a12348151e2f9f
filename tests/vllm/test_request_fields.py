"""The list of request fields is vLLM's own: a field that is missing from it would be refused by the
gateway, and one too many would be ignored by vLLM."""

from __future__ import annotations

from vllm.entrypoints.generate.base.protocol import StreamOptions
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import (
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)

from prfaas.contracts.openai_fields import VLLM, VLLM_STREAM_OPTIONS
from prfaas.text import Chat
from prfaas.text.tokenization import EMPTY_ONLY, Detokenize, TokenizeOptions, TokenizePrompt


def test_the_fields_of_both_endpoints_are_those_of_vllm() -> None:
    assert set(CompletionRequest.model_fields) == VLLM["completions"]
    assert set(ChatCompletionRequest.model_fields) == VLLM["chat"]
    assert set(StreamOptions.model_fields) == VLLM_STREAM_OPTIONS


def test_tokenize_and_detokenize_have_vllms_fields() -> None:
    assert set(TokenizeCompletionRequest.model_fields) == set(TokenizePrompt.__struct_fields__)
    assert set(DetokenizeRequest.model_fields) == set(Detokenize.__struct_fields__)
    ours = {*TokenizeOptions.__struct_fields__, *Chat.__struct_fields__, *EMPTY_ONLY}
    assert set(TokenizeChatRequest.model_fields) <= ours
