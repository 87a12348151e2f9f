"""The parameters that both engines serve, as requests whose answer is determined: by greedy choice,
by a choice of one token, or by a grammar. `tests/vllm/test_parameters.py` sends them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

MAX_TOKENS = 12
UPPER = list(range(65, 91))  # ids of the byte tokenizer: A to Z


class Plain(NamedTuple):
    """What vLLM answers to the same prompt, greedily and without any of the parameters."""

    tokens: list[int]
    text: str


Fields = Callable[[Plain], dict[str, Any]]

# Of both endpoints.
COMMON: dict[str, Fields] = {
    "nothing": lambda plain: {},
    "max_tokens": lambda plain: {"max_tokens": 3},
    "top_p": lambda plain: {"temperature": 1.0, "top_p": 1e-6},
    "top_k": lambda plain: {"temperature": 1.0, "top_k": 1},
    "min_p": lambda plain: {"temperature": 1.0, "min_p": 1.0},
    "stop_token_ids": lambda plain: {"stop_token_ids": [plain.tokens[4]]},
    "min_tokens": lambda plain: {"stop_token_ids": [plain.tokens[2]], "min_tokens": 5},
    "stop": lambda plain: {"stop": [plain.text[3:5]]},
    "include_stop_str_in_output": lambda plain: {
        "stop": [plain.text[3:5]],
        "include_stop_str_in_output": True,
    },
    "presence_penalty": lambda plain: {"presence_penalty": 1.7},
    "frequency_penalty": lambda plain: {"frequency_penalty": 1.3},
    "repetition_penalty": lambda plain: {"repetition_penalty": 1.8},
    "logit_bias": lambda plain: {"logit_bias": {str(plain.tokens[0]): -100, "77": 3.5}},
    "bad_words": lambda plain: {"bad_words": [chr(plain.tokens[0] % 128 or 65), "ab"]},
    "allowed_token_ids": lambda plain: {"allowed_token_ids": UPPER},
    "skip_special_tokens": lambda plain: {"skip_special_tokens": False},
    "ignore_eos": lambda plain: {"ignore_eos": True},
    "n": lambda plain: {"temperature": 1.0, "top_k": 1, "n": 3},
    "response_format, a schema": lambda plain: {
        "allowed_token_ids": None,
        "max_tokens": 40,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "one", "schema": {"enum": ["north", "south"]}},
        },
    },
    "structured_outputs, a regular expression": lambda plain: {
        "structured_outputs": {"regex": "[a-f]{6}-[0-9]{4}"}
    },
    "structured_outputs, choices": lambda plain: {
        "structured_outputs": {"choice": ["first one", "second", "third"]}
    },
}
COMPLETIONS: dict[str, Fields] = {
    **COMMON,
    "logprobs": lambda plain: {"logprobs": 4},
    "logprobs of nothing but the tokens": lambda plain: {"logprobs": 0},
    "echo": lambda plain: {"echo": True},
    "echo with logprobs": lambda plain: {"echo": True, "logprobs": 2},
    "prompt_logprobs": lambda plain: {"prompt_logprobs": 2},
}
CHATS: dict[str, Fields] = {
    **COMMON,
    "max_completion_tokens": lambda plain: {"max_tokens": None, "max_completion_tokens": 5},
    "logprobs": lambda plain: {"logprobs": True},
    "top_logprobs": lambda plain: {"logprobs": True, "top_logprobs": 3},
    "prompt_logprobs": lambda plain: {"prompt_logprobs": 1},
}
# These are never handed off: the decode node computes the whole prompt.
OF_THE_PROMPT = frozenset({"echo with logprobs", "prompt_logprobs"})
