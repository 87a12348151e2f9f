"""Chat templates, rendered as transformers renders them: sandboxed Jinja with a few additions.

A template is code of the model's author and its input comes from untrusted clients. It gets plain
JSON values only, and an exception that it raises is an error of the request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from prfaas.errors import InputError
from prfaas.text.chat import Chat
from prfaas.text.tool_calls import find_form

_REASONING = ("reasoning_content", "thinking", "reasoning")  # names for the same thing; first wins
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are `bos_token` and the like. InputError when `source` is not a
        template."""
        self._special_tokens = special_tokens
        self.tool_form = find_form(source)  # None: the template shows no known form
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.content_is_parts = _content_is_parts(environment.parse(source))
        except TemplateError as error:
            raise InputError(f"not a chat template: {error}", where="chat_template") from None

    def render(self, chat: Chat) -> str:
        """The prompt's text. InputError when the template refuses the chat."""
        messages = [_with_reasoning(message) for message in chat.messages]
        last = ""
        if chat.continue_final_message:
            messages, last = _marked(messages)
        try:
            text = self._template.render(
                **{
                    **self._special_tokens,
                    **chat.variables,
                    "messages": messages,
                    "tools": chat.tools,
                    "documents": chat.documents,
                    "add_generation_prompt": chat.add_generation_prompt,
                }
            )
        except RecursionError:
            raise InputError(
                "the messages are nested too deeply for the chat template", where="messages"
            ) from None
        except Exception as error:
            # The author's code on a client's input: raise_exception(), or any error that Python
            # raises for an unexpected type.
            reason = str(error) or type(error).__name__
            raise InputError(
                f"the chat template refuses the messages: {reason}", where="messages"
            ) from None
        return _cut(text, last) if chat.continue_final_message else text


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationMarks, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _TemplateDict()
    environment.globals["namespace"] = _TemplateNamespace
    return environment


class _GenerationMarks(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; it renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: Any) -> Any:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, unlike Jinja's filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


class _TemplateDict:
    """`dict(...)` without access to the class."""

    def __call__(self, *items: Any, **named: Any) -> dict[Any, Any]:
        return dict(*items, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


class _TemplateNamespace(Namespace):
    def __init__(*arguments: Any, **named: Any) -> None:
        # As in Jinja: a template may use `self` as a name.
        self, rest = arguments[0], arguments[1:]
        attributes = dict(*rest, **named)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attribute {name!r}")


# Messages -----------------------------------------------------------------------------------------


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _marked(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """The messages with a mark after the last one, at which the rendered text is cut off."""
    *before, final = messages or [{}]
    content = final.get("content")
    if isinstance(content, str):
        return [*before, {**final, "content": content + _CONTINUE}], content
    if isinstance(content, list):
        for index in range(len(content) - 1, -1, -1):
            part = content[index]
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                parts = [*content]
                parts[index] = {**part, "text": part["text"] + _CONTINUE}
                return [*before, {**final, "content": parts}], part["text"]
    raise InputError(
        "the last message has no text to continue", where="continue_final_message", fix="add text"
    )


def _cut(text: str, last: str) -> str:
    mark = _CONTINUE.strip()
    if last.strip() not in text or mark not in text:
        raise InputError(
            "the chat template does not keep the last message as it is",
            where="continue_final_message",
        )
    at = text.rindex(mark)
    # A template that trims messages has trimmed the mark's space; it would trim the text's too.
    kept = text[at : at + len(_CONTINUE)] == _CONTINUE
    return text[:at] if kept else text[:at].rstrip()


def _content_is_parts(template: nodes.Template) -> bool:
    """Whether the template iterates over `message.content` instead of writing it as text."""
    contents = {"content"}
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, contents):
            contents.add(assign.target.name)
    return any(_is_content(loop.iter, contents) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    match node:
        case nodes.Filter(node=inner) | nodes.Test(node=inner):
            return _is_content(inner, names)
        case nodes.Getattr(attr=attribute):
            return attribute == "content"
        case nodes.Getitem(arg=nodes.Const(value=key)):
            return bool(key == "content")
        case nodes.Name(name=name):
            return name in names
        case _:
            return False
