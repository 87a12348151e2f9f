"""Every known parameter, and an unknown one, through the gateway to a `prfaas node`: it is served,
or refused by its name before anything is computed. None is ignored in silence."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import aiohttp
import pytest

from prfaas.clock import MonotonicClock
from prfaas.contracts.openai_fields import WITHOUT_EFFECT, Endpoint, known_fields
from prfaas.gateway.api.credentials import GatewayCredentials
from prfaas.gateway.process import GatewayOptions
from prfaas.gateway.process import serving as serving_http
from prfaas.node.served.fields import FIXED, SERVED
from prfaas.text import load_tokenizer
from tests.gateway.backends import MODEL, THRESHOLD, serving
from tests.gateway.conftest import Hosts
from tests.waiting import HANG_S

PATHS: dict[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
# Values that change an answer, or would: none of them says what is the case anyway.
VALUES: dict[str, Any] = {
    **{"model": MODEL, "max_tokens": 2, "max_completion_tokens": 2, "n": 2, "best_of": 2},
    **{"temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 7, "stop": ["x"]},
    **{"stream": True, "frequency_penalty": 1.0, "presence_penalty": 1.0, "user": "u"},
    **{"repetition_penalty": 1.5, "logit_bias": {"7": 5}, "echo": True, "suffix": "x"},
    **{"length_penalty": 2.0, "use_beam_search": True, "early_stopping": True, "min_tokens": 1},
    **{"stop_token_ids": [7], "ignore_eos": True, "include_stop_str_in_output": True},
    **{"bad_words": ["x"], "allowed_token_ids": [7, 8], "skip_special_tokens": False},
    **{"spaces_between_special_tokens": False, "add_special_tokens": True},
    **{"truncate_prompt_tokens": 1, "truncation_side": "left", "prompt_logprobs": 1},
    **{"logprob_token_ids": [7], "return_token_ids": True, "return_token_offsets": True},
    **{"return_tokens_as_token_ids": True, "response_format": {"type": "json_object"}},
    **{"structured_outputs": {"json": SCHEMA}, "guided_json": SCHEMA, "guided_regex": "a+"},
    **{"guided_choice": ["a"], "guided_grammar": "a", "guided_json_object": True},
    **{"guided_decoding_backend": "x", "guided_whitespace_pattern": "x", "structural_tag": "x"},
    **{"repetition_detection": {"max_pattern_size": 3}, "thinking_token_budget": 5},
    **{"watermarking": True, "cache_salt": "s", "kv_transfer_params": {"do_reference": True}},
    **{"ec_transfer_params": {"a": 1}, "priority": 1, "request_id": "r", "session_id": "s"},
    **{"stream_interval": 5, "routed_experts_prompt_start": 1, "mm_payload": "features"},
    **{"return_mm_kwargs": True, "vllm_xargs": {"a": 1}, "custom_params": {"a": 1}},
    **{"prompt_embeds": ["AAAA"], "logits_processors": ["x"], "detokenize": False},
    **{"top_logprobs": 1, "tools": [TOOL], "tool_choice": "required"},
    **{"parallel_tool_calls": False, "functions": [{"name": "f"}], "function_call": {"name": "f"}},
    **{"reasoning_effort": "low", "verbosity": "low", "modalities": ["audio"]},
    **{"audio": {"voice": "x"}, "prediction": {"type": "content", "content": "x"}},
    **{"web_search_options": {"a": 1}, "moderation": {"a": 1}, "service_tier": "flex"},
    **{"store": True, "metadata": {"a": "b"}, "safety_identifier": "s"},
    **{"prompt_cache_key": "k", "prompt_cache_options": {"a": 1}},
    **{"prompt_cache_retention": "24h", "include_reasoning": False},
    **{"documents": [{"text": "x"}], "add_generation_prompt": False},
    **{"continue_final_message": True, "chat_template": "x"},
    **{"chat_template_kwargs": {"a": 1}, "chat_template_content_format": "string"},
    **{"media_io_kwargs": {"image": {"a": 1}}, "mm_processor_kwargs": {"a": 1}},
    "return_prompt_text": True,
}
# Of these the value depends on the endpoint, or on another field.
MORE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True, "stream_options": {"include_usage": True}},
    "continue_final_message": {"add_generation_prompt": False},
    "tool_choice": {"tools": [TOOL]},
    "top_logprobs": {"logprobs": True},
    "return_tokens_as_token_ids": {"logprobs": True},
    "n": {"temperature": 1.0},
}


def body_of(endpoint: Endpoint, name: str, tokens: int) -> dict[str, Any]:
    text = "a" * tokens
    prompt: dict[str, Any] = {"prompt": text}
    if endpoint == "chat":
        prompt = {"messages": [{"role": "user", "content": text}]}
    more = dict(MORE.get(name, {}))
    if more.get("logprobs") and endpoint == "completions":
        more["logprobs"] = 1
    value = {name: VALUES[name]} if name in VALUES else {}
    if name == "logprobs":
        value = {name: 1 if endpoint == "completions" else True}
    return {**prompt, "max_tokens": 1, "temperature": 0.0, **more, **value}


def is_accepted(endpoint: Endpoint, name: str) -> bool:
    neutral = FIXED[endpoint].get(name, ())
    return name in SERVED[endpoint] | WITHOUT_EFFECT or VALUES.get(name) in neutral


async def problem_of(http: aiohttp.ClientSession, url: str, endpoint: Endpoint, name: str) -> str:
    """Empty when the field is accepted as documented, or refused by its name."""
    accepted = is_accepted(endpoint, name)
    # A long prompt would be offloaded: the refusal comes before that.
    body = body_of(endpoint, name, 8 if accepted else 2 * THRESHOLD)
    if name == "unheard_of":
        body[name] = None
    async with http.post(
        f"{url}{PATHS[endpoint]}", json=body, headers={"X-Request-Id": f"{endpoint}-{name}"}
    ) as answer:
        text = await answer.text()
    if answer.status == 200:
        return "" if accepted else f"{endpoint} {name}: {text[:200]}"
    param = json.loads(text)["error"]["param"] or ""
    # An emulated engine has no logits, and refuses by name what needs them.
    named = param.split(".")[0] in (name, *MORE.get(name, ()))
    return "" if answer.status == 400 and named else f"{endpoint} {name}: {text[:300]}"


async def test_no_field_is_ignored(emulated: Hosts, caplog: pytest.LogCaptureFixture) -> None:
    made = emulated.deployment()
    options = GatewayOptions(
        tokenizer=load_tokenizer(emulated.tokenizer),
        tokenizer_folder=emulated.tokenizer,
        credentials=GatewayCredentials(lambda: ()),
    )
    cases = [
        (endpoint, name)
        for endpoint in PATHS
        for name in sorted(known_fields(endpoint) - {"prompt", "messages"})
    ]
    assert {name for _, name in cases} == {*VALUES, *MORE, "logprobs"}
    with caplog.at_level(logging.INFO, "prfaas.gateway.requests"):
        async with (
            asyncio.timeout(HANG_S),
            serving(made) as backend,
            aiohttp.ClientSession() as http,
        ):
            with socket.create_server(("127.0.0.1", 0)) as listening:
                async with serving_http(made, backend, options, MonotonicClock(), listening) as url:
                    cases += [(endpoint, "unheard_of") for endpoint in PATHS]
                    calls = [problem_of(http, url, *case) for case in cases]
                    wrong = [problem for problem in await asyncio.gather(*calls) if problem]
    assert not wrong, "\n".join(wrong)
    lines = [json.loads(record.getMessage()) for record in caplog.records]
    refused = {line["id"]: line for line in lines if line["outcome"] == "rejected"}
    assert {"completions-unheard_of", "chat-unheard_of", "chat-functions"} <= refused.keys()
    assert not [name for name, line in refused.items() if line["form"]], "nothing was granted"
