"""What we make of a chat is what transformers makes of it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from prfaas.engine.checkpoint.tokenizer import EOS, build_tokenizer, save_tokenizer, token_id
from prfaas.errors import InputError
from prfaas.text import Chat, ModelTokenizer, load_tokenizer
from prfaas.text.token_text import token_text

# Touches what transformers adds to Jinja: tojson, strftime_now, loop controls, generation blocks,
# namespaces, special tokens, trimmed blocks.
RICH = """{{ bos_token }}{%- set seen = namespace(users=0) %}
{%- if tools %}
TOOLS {{ tools | tojson(indent=2) }} {{ tools[0].function | tojson }}
{%- endif %}
  {% for message in messages %}
    {%- if message.role == "skip" %}{% continue %}{% endif %}
    {%- if message.role == "user" %}{% set seen.users = seen.users + 1 %}{% endif %}
<|im_start|>{{ message.role }}
{% generation %}{{ message.content | trim }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %} CALL {{ call.function.arguments | tojson }}
    {%- endfor %}
    {%- if message.reasoning_content %} THINK {{ message.reasoning_content }}{% endif %}<|im_end|>
  {% endfor %}
{{ strftime_now("%Y") }} {{ seen.users }} {{ dict(a=1) | tojson }} {{ mood | default("plain") }}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}{{ eos_token }}"""
PARTS = """{% for message in messages %}{{ message.role }}:
{%- for part in message["content"] %}[{{ part.text }}]{% endfor %};{% endfor %}"""
TOOL = {
    "type": "function",
    "function": {"name": "find", "description": "<b> & é", "parameters": {"type": "object"}},
}
CONVERSATION = [
    {"role": "system", "content": "  Be brief. "},
    {"role": "user", "content": "Why is \u00e9 > e & <|im_end|>?"},
    {"role": "skip", "content": "never"},
    {"role": "assistant", "content": "Since.", "reasoning": "hm"},
    {"role": "user", "content": "Really?"},
]


def folder(at: Path, template: str | None = None, **config: Any) -> Path:
    at.mkdir(exist_ok=True)
    save_tokenizer(at, max_tokens=4096)
    if template is not None:
        (at / "chat_template.jinja").write_text(template)
    if config:
        path = at / "tokenizer_config.json"
        path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes()) | config))
    return at


@pytest.fixture
def both(tmp_path: Path) -> Callable[..., tuple[ModelTokenizer, Any]]:
    def both(template: str | None = None, **config: Any) -> tuple[ModelTokenizer, Any]:
        at = folder(tmp_path, template, **config)
        return load_tokenizer(at), AutoTokenizer.from_pretrained(at)

    return both


@pytest.mark.parametrize("template", [None, RICH])
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("variables", [{}, {"mood": "gay", "tools_in_user_message": False}])
@pytest.mark.parametrize("prompting", [True, False])
def test_chats_are_rendered_as_transformers_does(
    both: Callable[..., tuple[ModelTokenizer, Any]],
    template: str | None,
    tools: Any,
    variables: dict[str, Any],
    prompting: bool,
) -> None:
    words, theirs = both(template)
    chat = Chat(
        CONVERSATION, tools, add_generation_prompt=prompting, chat_template_kwargs=variables
    )
    rendered = theirs.apply_chat_template(
        CONVERSATION, tools=tools, add_generation_prompt=prompting, tokenize=False, **variables
    )
    assert words.render(chat) == rendered
    ids = theirs.apply_chat_template(
        CONVERSATION, tools=tools, add_generation_prompt=prompting, **variables
    )["input_ids"]
    assert words.encode_chat(chat) == ids
    assert words.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_a_last_message_is_continued_as_transformers_does(
    both: Callable[..., tuple[ModelTokenizer, Any]],
) -> None:
    for template in (None, RICH):
        words, theirs = both(template)
        for last in ("It is", "It is  "):
            messages = [*CONVERSATION, {"role": "assistant", "content": last}]
            chat = Chat(messages, add_generation_prompt=False, continue_final_message=True)
            assert words.render(chat) == theirs.apply_chat_template(
                messages, tokenize=False, continue_final_message=True
            )


def test_arguments_of_calls_are_objects_to_a_template(
    both: Callable[..., tuple[ModelTokenizer, Any]],
) -> None:
    words, theirs = both(RICH)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    parsed = {**call, "function": {"name": "f", "arguments": {"a": [1]}}}
    sent = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    read = [{"role": "assistant", "content": "", "tool_calls": [parsed]}]
    assert words.render(Chat(sent)) == theirs.apply_chat_template(
        read, tokenize=False, add_generation_prompt=True
    )
    call["function"]["arguments"] = "{"
    with pytest.raises(InputError, match="arguments"):
        words.render(Chat(sent))


def test_parts_are_joined_or_kept_as_the_template_reads_them(tmp_path: Path) -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]
    assert load_tokenizer(folder(tmp_path, PARTS)).render(Chat(messages)) == "user:[a][b];user:[c];"
    joined = "{% for message in messages %}{{ message.content }};{% endfor %}"
    assert load_tokenizer(folder(tmp_path, joined)).render(Chat(messages)) == "a\nb;c;"


def test_a_template_of_its_own_for_tools(both: Callable[..., tuple[ModelTokenizer, Any]]) -> None:
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "with {{ tools | length }}"},
    ]
    words, _ = both(chat_template=named)
    assert words.render(Chat(CONVERSATION)) == "plain"
    assert words.render(Chat(CONVERSATION, [TOOL])) == "with 1"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content }}", "refuses"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{% set n = namespace() %}{% set n.__x = 1 %}", "__x"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_what_a_template_will_not_take_is_the_requests_fault(
    tmp_path: Path, template: str, says: str
) -> None:
    words = load_tokenizer(folder(tmp_path, template))
    with pytest.raises(InputError, match=says):
        words.render(Chat(CONVERSATION))


def test_a_folder_that_is_wrong_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"tokenizer\.json: no such file"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match=r"chat_template\.jinja: .*not a chat template"):
        load_tokenizer(folder(tmp_path, "{% if %}"))
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_a_model_without_a_template_does_not_chat(tmp_path: Path) -> None:
    words = load_tokenizer(folder(tmp_path, chat_template=None))
    with pytest.raises(InputError, match="no chat template"):
        words.encode_chat(Chat(CONVERSATION))
    assert words.encode("né") == [110, 195, 169]


def test_encoding_leaves_the_interpreter_to_other_threads() -> None:
    """Otherwise one long text stops a gateway's event loop."""
    tokenizer, text = ModelTokenizer(build_tokenizer(), {}), "once upon a time " * 10_000
    ended: list[int] = []

    def goes_on_meanwhile() -> bool:
        ended.clear()
        thread = threading.Thread(target=lambda: ended.append(len(tokenizer.encode(text))))
        thread.start()  # returns when this thread gets the interpreter
        meanwhile = not ended
        thread.join()
        assert ended == [len(text)]
        return meanwhile

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)  # the interpreter is only given away, not taken
    try:
        assert any(goes_on_meanwhile() for _ in range(20))
    finally:
        sys.setswitchinterval(interval_s)


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    tokenizer = ModelTokenizer(build_tokenizer(), {})
    *begin, last = tokenizer.encode("é€")
    context: list[int] = []
    texts = []
    for token in (*begin, last):
        texts.append(tokenizer.token_text(token, context))
        context.append(token)
    assert texts == ["", "é", "", "", "€"]
    assert tokenizer.token_text(token_id(EOS), context) == EOS


def test_leading_spaces_of_sentencepiece_stay() -> None:
    def decode(ids: Sequence[int]) -> str:
        return "the" * len(ids)

    assert token_text(decode, 1, "▁the", []) == " the"
    assert token_text(decode, 1, "▁▁the", []) == "  the"
    assert token_text(decode, 1, "the", []) == "the"


def test_bad_words_are_tokenised_with_and_without_a_space() -> None:
    merged = Tokenizer(models.WordLevel({"a": 0, " a": 1, " ": 2, "?": 3}, unk_token="?"))
    assert ModelTokenizer(merged, {}).encode_bad_word(" a") == [[0], [1]]
    # A space of its own would ban the space.
    assert ModelTokenizer(build_tokenizer(), {}).encode_bad_word("ab") == [[97, 98]]
    assert ModelTokenizer(build_tokenizer(), {}).encode_bad_word("  ") == []
