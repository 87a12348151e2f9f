"""Loads a checkpoint's `tokenizer.json`, `tokenizer_config.json` and chat template. The template is
in the latter or in `chat_template.jinja`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from prfaas.config.strict import read_text
from prfaas.errors import InputError
from prfaas.text.chat import Chat
from prfaas.text.conversation import conversation, tool_schemas
from prfaas.text.template import ChatTemplate
from prfaas.text.token_text import token_text
from prfaas.text.tool_calls import ToolForm

_DEFAULT, _WITH_TOOLS = "default", "tool_use"


class ModelTokenizer:
    """Safe to use from several threads at once. Encoding releases the GIL."""

    def __init__(self, tokenizer: Tokenizer, templates: Mapping[str, ChatTemplate]) -> None:
        # A checkpoint may configure truncation or padding; a prompt is used as the client sent it.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._templates = templates
        # In characters. A text has at least len(text) / longest_token tokens.
        self.longest_token = max(map(len, tokenizer.get_vocab()), default=1)

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self._tokenizer.get_vocab().values(), default=-1) + 1

    def to_json(self) -> str:
        """In the form of tokenizer.json."""
        text: str = self._tokenizer.to_str()
        return text

    @property
    def tool_form(self) -> ToolForm | None:
        """How the model writes tool calls. None when its chat template does not show it."""
        return self._template(with_tools=True).tool_form

    def special_token_id(self, text: str) -> int | None:
        """None when the text is not a special token: ordinary tokens can write it."""
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            if added.special and added.content == text:
                return int(token)
        return None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """`add_special_tokens`: add the tokens that the tokenizer puts around a text."""
        # The library's `encode` keeps the GIL until its end: a quarter of a second for 250 KB.
        # Without the places of the tokens, which are not needed, this takes half of that time.
        (encoding,) = self._tokenizer.encode_batch_fast(
            [text], add_special_tokens=add_special_tokens
        )
        ids: list[int] = encoding.ids
        return ids

    def encode_chat(self, chat: Chat) -> list[int]:
        """The prompt of a client's chat request. InputError names the field."""
        return self.encode(self.render(chat), add_special_tokens=chat.add_special_tokens)

    def render(self, chat: Chat) -> str:
        template = self._template(with_tools=bool(chat.tools))
        messages = conversation(chat.messages, content_is_parts=template.content_is_parts)
        tools = tool_schemas(chat.tools)
        return template.render(msgspec.structs.replace(chat, messages=messages, tools=tools))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def decode_all(self, ids: Sequence[int]) -> str:
        """With special tokens."""
        return self.decode(ids, skip_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str | None]:
        """The tokenizer's names of the tokens; None for an id that it does not have."""
        return [self._tokenizer.id_to_token(token) for token in ids]

    def token_text(self, token: int, context: Sequence[int]) -> str:
        """The text of one token after the tokens of `context`."""
        piece = self._tokenizer.id_to_token(token) or ""
        return token_text(self.decode_all, token, piece, context)

    def encode_bad_word(self, word: str) -> list[list[int]]:
        """The token sequences of a word at the beginning and in the middle of a text, as vLLM
        bans them. Empty when the word has no tokens."""
        alone = self.encode(word.lstrip(), add_special_tokens=False)
        after_space = self.encode(" " + word.lstrip(), add_special_tokens=False)
        if not alone:
            return []
        # A separate token for the space would make another word of it.
        is_one_word = len(after_space) == len(alone) and after_space[0] != alone[0]
        return [alone, after_space] if is_one_word else [alone]

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        names = [_WITH_TOOLS, _DEFAULT] if with_tools else [_DEFAULT]
        for name in names:
            if name in self._templates:
                return self._templates[name]
        raise InputError(
            "this model has no chat template", where="messages", fix="use /v1/completions"
        )


def load_tokenizer(directory: Path) -> ModelTokenizer:
    return ModelTokenizer(_tokenizer(directory / "tokenizer.json"), _templates(directory))


def _tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise InputError(
            "no such file", file=path, fix="save the tokenizer in its fast (JSON) form"
        )
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"the file is not a tokenizer: {error}", file=path) from None


def _templates(directory: Path) -> dict[str, ChatTemplate]:
    path = directory / "tokenizer_config.json"
    config: dict[str, Any] = {}
    if path.is_file():
        try:
            config = msgspec.json.decode(read_text(path), type=dict[str, Any])
        except msgspec.MsgspecError as error:
            raise InputError(
                f"the file is not a tokenizer's configuration: {error}", file=path
            ) from None
    special = _special_tokens(config)
    beside = directory / "chat_template.jinja"
    if beside.is_file():
        path, sources = beside, {_DEFAULT: read_text(beside)}
    else:
        sources = _sources(config.get("chat_template"))
    more = directory / "additional_chat_templates"
    sources |= {found.stem: read_text(found) for found in sorted(more.glob("*.jinja"))}
    try:
        return {name: ChatTemplate(source, special) for name, source in sources.items()}
    except InputError as error:
        raise error.in_file(path) from None


def _sources(templates: object) -> dict[str, str]:
    """Templates by name, from one template or a list of named ones."""
    if isinstance(templates, str):
        return {_DEFAULT: templates}
    if isinstance(templates, list):
        return {named["name"]: named["template"] for named in templates}
    return {}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, token in config.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
