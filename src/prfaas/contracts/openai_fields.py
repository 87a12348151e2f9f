"""Every request parameter of OpenAI's two endpoints and of vLLM's extensions. Pure.

One list for the gateway, which refuses a field that the decode engine would ignore, and for the
table in docs/api.md. A test compares it with the request classes of vLLM and of OpenAI's client.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

Endpoint: TypeAlias = Literal["completions", "chat"]

_OPENAI_COMMON = frozenset(
    {
        *("model", "max_tokens", "n", "temperature", "top_p", "seed", "stop", "stream"),
        *("stream_options", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs"),
        "user",
    }
)
OPENAI: dict[Endpoint, frozenset[str]] = {
    "completions": _OPENAI_COMMON | {"prompt", "best_of", "echo", "suffix"},
    "chat": _OPENAI_COMMON
    | {
        *("messages", "max_completion_tokens", "top_logprobs", "response_format"),
        *("tools", "tool_choice", "parallel_tool_calls", "functions", "function_call"),
        *("reasoning_effort", "verbosity", "modalities", "audio", "prediction"),
        *("web_search_options", "moderation", "service_tier", "store", "metadata"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_options"),
        "prompt_cache_retention",
    },
}

_VLLM_COMMON = frozenset(
    {
        *("model", "max_tokens", "n", "temperature", "top_p", "seed", "stop", "stream"),
        *("stream_options", "frequency_penalty", "presence_penalty", "logit_bias", "logprobs"),
        *("user", "echo", "response_format", "top_k", "min_p", "repetition_penalty"),
        *("length_penalty", "use_beam_search", "min_tokens", "stop_token_ids", "ignore_eos"),
        *("include_stop_str_in_output", "bad_words", "allowed_token_ids", "skip_special_tokens"),
        *("spaces_between_special_tokens", "add_special_tokens", "truncate_prompt_tokens"),
        *("truncation_side", "prompt_logprobs", "logprob_token_ids", "return_token_ids"),
        *("return_tokens_as_token_ids", "return_token_offsets", "structured_outputs"),
        *("repetition_detection", "thinking_token_budget", "watermarking", "cache_salt"),
        *("kv_transfer_params", "ec_transfer_params", "priority", "request_id", "session_id"),
        *("stream_interval", "routed_experts_prompt_start", "mm_payload", "return_mm_kwargs"),
        "vllm_xargs",
    }
)
# As of version 0.32. vLLM ignores every other field in silence.
VLLM: dict[Endpoint, frozenset[str]] = {
    "completions": _VLLM_COMMON | {"prompt", "prompt_embeds", "suffix"},
    "chat": _VLLM_COMMON
    | {
        *("messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice"),
        *("parallel_tool_calls", "reasoning_effort", "include_reasoning", "documents"),
        *("add_generation_prompt", "continue_final_message", "chat_template"),
        *("chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs"),
        "return_prompt_text",
    },
}

# Options of a stream that vLLM knows.
VLLM_STREAM_OPTIONS = frozenset({"include_usage", "continuous_usage_stats"})

# Names of earlier versions of vLLM, of its Python API and of other servers, which clients still
# send.
OTHER = frozenset(
    {
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
        *("guided_decoding_backend", "guided_whitespace_pattern", "structural_tag"),
        *("early_stopping", "logits_processors", "detokenize", "custom_params"),
        "chat_template_content_format",
    }
)

# These do not change an answer: a name for the sender or the request, or a hint for caches.
WITHOUT_EFFECT = frozenset(
    {
        *("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
        *("request_id", "session_id"),
    }
)

# The gateway refuses these with any value but null. They would change the engine's prompt, which
# would differ from the one that is routed and handed off.
REFUSED_BY_GATEWAY = {
    "kv_transfer_params": "only the gateway sets this field",
    "chat_template": "the gateway uses the model's chat template",
    "truncate_prompt_tokens": "the gateway does not truncate prompts",
    "prompt_embeds": "a prompt must be text or token ids",
}
# The gateway accepts these with these values and with null. vLLM does not know them.
FIXED_BY_GATEWAY: dict[str, tuple[object, ...]] = {"best_of": (1,)}


def known_fields(endpoint: Endpoint) -> frozenset[str]:
    return OPENAI[endpoint] | VLLM[endpoint] | OTHER | WITHOUT_EFFECT


def passed_to_vllm(endpoint: Endpoint) -> frozenset[str]:
    """What the gateway passes on to a vLLM, which ignores every other field in silence."""
    checked = OPENAI[endpoint] & FIXED_BY_GATEWAY.keys()
    return VLLM[endpoint] | WITHOUT_EFFECT | checked
