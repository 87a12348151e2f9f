"""docs/api.md: every request parameter of OpenAI's two endpoints and of vLLM's extensions, and what
becomes of it. The tables are made from the structs and lists that check requests.
"""

from __future__ import annotations

import msgspec

from prfaas.contracts.openai import MAX_CHOICES, MAX_PROMPTS, MAX_TOTAL_CHOICES
from prfaas.contracts.openai_fields import (
    FIXED_BY_GATEWAY,
    OPENAI,
    REFUSED_BY_GATEWAY,
    VLLM,
    VLLM_STREAM_OPTIONS,
    WITHOUT_EFFECT,
    Endpoint,
    known_fields,
)
from prfaas.node.known_fields import STREAM_OPTIONS
from prfaas.node.served.fields import FIXED, SERVED

_TITLES: dict[Endpoint, str] = {
    "completions": "`POST /v1/completions`",
    "chat": "`POST /v1/chat/completions`",
}
_INTRODUCTION = f"""# The API

<!-- Generated: `make docs` writes this page from the schema. -->

Two endpoints of OpenAI, with vLLM's extensions, at the gateway and at every node. No field is
ignored in silence: a field that is not served is refused with status 400 and its name in
`param`, before anything is computed. A node publishes the fields that it accepts
(`prfaas.serves` in `GET /v1/models`), and the gateway refuses every other field before it opens
a transfer. The fields of vLLM are listed in `contracts/openai_fields.py`, because vLLM ignores
the fields that it does not know; the gateway refuses these, except null. Whether an engine
accepts the *value* of a field, the gateway asks its `render` path before a hand-off.

| word | meaning |
|---|---|
| served | `prfaas node` follows the field |
| passed on | the gateway sends the field to vLLM unchanged, and vLLM follows or refuses it |
| only ... | accepted with these values, which ask for nothing, and with null; refused with others |
| no effect | accepted, because the field does not change an answer |
| refused | refused by its name |

## Lists of prompts, and `n`

A completion may have up to {MAX_PROMPTS} prompts, `n` may be up to {MAX_CHOICES}, and both
together make at most {MAX_TOTAL_CHOICES} choices. Choice j of prompt p has index p * n + j. Usage
is the sum: the tokens of each prompt once, the generated tokens of all choices. The gateway
routes each prompt by itself (`gateway/prompt_lists/fan_out.py`), so that some prompts of a list
may be offloaded and others not; the `n` choices of a prompt share one prefill and one transfer.
Prompts of a list that are under way at once (at most 64, and never more than `max_in_flight` of
the tenant) count with all their choices. An error of one prompt is the error of the request. After
the first byte of a stream it is the last event, and the other prompts are cancelled. The
request log has one line, with sums, and the course of every prompt under `prompts`.
"""
_TOKENIZATION = """## `POST /tokenize` and `/detokenize`

At the gateway, which needs `[gateway] tokenizer`, and at nodes. The fields are vLLM's. The
gateway takes bodies of at most 256 KiB, and counts them for their tenant.

| path | fields | answer |
|---|---|---|
| `/tokenize` | `prompt`, `add_special_tokens`; or `messages` and fields of a chat | `tokens` |
| `/detokenize` | `tokens` | `prompt`, with special tokens |

Both have `model`. With `return_token_strs` /tokenize also answers `token_strs`; its answer
always has `count` and `max_model_len`.

`chat_template`, `media_io_kwargs` and `mm_processor_kwargs` are accepted when they are empty.
Ids that are not in the vocabulary are refused.
"""
_DIFFERENCES = """## Differences from vLLM

Semantics are those of vLLM 0.32 ([nodes.md](nodes.md#sampling-parameters) has those of the
sampling parameters), except:

- A field that is unknown, or not served, is refused. vLLM ignores unknown fields.
- `n` and lists of prompts have limits (above).
- At a node, `echo` with `max_tokens` 0 generates no token, where vLLM counts one in `usage`. The
  gateway requires `max_tokens` of at least 1.
- At a node, a response has at most 524,288 log-probabilities of prompts.
- At a node, `temperature` may be up to 100 and `stop` may have 16 strings.
- At a node, `return_token_ids` does not add the token ids of the prompt, and `echo` beside it still
  repeats the prompt's text.
- At a node, bytes at the end of an answer that are no whole character appear as U+FFFD. vLLM leaves
  them out.
- At a node, `stop_reason` is null for every end of the text. vLLM names it where
  generation_config.json lists several, except the first one.
- At a node, a request whose `allowed_token_ids`, `bad_words` and `min_tokens` leave no token to
  generate fails with status 500, alone.
- The gateway sends token ids to the decode engine: the text that `echo` repeats is that of the
  tokens.
- Requests for log-probabilities of the prompt (`prompt_logprobs`, or `echo` with `logprobs`)
  are not offloaded.
- With a list of prompts, pieces of a stream have the `id`, `created` and `model` of the first
  piece, and an answer has no `kv_transfer_params`.
- Structured outputs and tool calls of a node have
  [a list of their own](structured-outputs.md#differences-from-vllm).
- An emulated engine makes its tokens up. It refuses penalties, `logit_bias`, `min_tokens`,
  `bad_words`, `allowed_token_ids` and log-probabilities.
"""


def reference() -> str:
    parts = [_INTRODUCTION, *map(_table, _TITLES), _stream_options(), _TOKENIZATION, _DIFFERENCES]
    return "\n".join(parts)


def at_node(endpoint: Endpoint, name: str) -> str:
    """What a `prfaas node` does with the field, asked directly."""
    if name in FIXED[endpoint]:
        return _only(FIXED[endpoint][name])
    if name in SERVED[endpoint]:
        return "served"
    return "no effect" if name in WITHOUT_EFFECT else "refused"


def at_vllm(endpoint: Endpoint, name: str) -> str:
    """What becomes of the field on its way through the gateway to a vLLM."""
    if name in REFUSED_BY_GATEWAY:
        return "refused"
    if name in FIXED_BY_GATEWAY:
        return _only(FIXED_BY_GATEWAY[name])
    if name in WITHOUT_EFFECT:
        return "no effect"
    return "passed on" if name in VLLM[endpoint] else "refused"


def _table(endpoint: Endpoint) -> str:
    lines = [
        f"## {_TITLES[endpoint]}",
        "",
        "| parameter | defined by | `prfaas node` | vLLM behind the gateway |",
        "|---|---|---|---|",
    ]
    for name in sorted(known_fields(endpoint) | SERVED[endpoint]):
        node = at_node(endpoint, name)
        if name in REFUSED_BY_GATEWAY and node != "refused":
            node += ", but refused by the gateway"
        lines.append(
            f"| `{name}` | {_origin(endpoint, name)} | {node} | {at_vllm(endpoint, name)} |"
        )
    lines += ["", "The gateway refuses, for every engine:", ""]
    for name, reason in REFUSED_BY_GATEWAY.items():
        if name in known_fields(endpoint):
            lines.append(f"- `{name}`: {reason}.")
    return "\n".join([*lines, ""])


def _stream_options() -> str:
    lines = [
        "## `stream_options`",
        "",
        "| option | `prfaas node` | vLLM behind the gateway |",
        "|---|---|---|",
        "| `include_usage` | served by the gateway | served by the gateway |",
    ]
    for name, values in STREAM_OPTIONS.items():
        vllm = "passed on" if name in VLLM_STREAM_OPTIONS else "only `false`"
        lines.append(f"| `{name}` | {_only(values)} | {vllm} |")
    return "\n".join([*lines, ""])


def _origin(endpoint: Endpoint, name: str) -> str:
    if name in OPENAI[endpoint]:
        return "OpenAI"
    return "vLLM" if name in VLLM[endpoint] else "others"


def _only(values: tuple[object, ...]) -> str:
    shown = [f"`{msgspec.json.encode(value).decode()}`" for value in values]
    return f"only {' or '.join(shown)}" if shown else "refused"
