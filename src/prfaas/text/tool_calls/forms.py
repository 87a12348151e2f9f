"""The forms of tool calls that are known, found by what a chat template says. Pure.

A grammar is in llguidance's dialect of Lark. It forces calls in the form that the parser reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from prfaas.text.tool_calls import kimi, llama, tagged
from prfaas.text.tool_calls.pieces import ToolCallParser
from prfaas.text.tool_calls.xml_calls import XmlCalls

Functions: TypeAlias = Sequence[Mapping[str, Any]]  # `name`, and perhaps `parameters`
# From a mark to its text in a grammar: marks may be special tokens, which no text can write.
Mark: TypeAlias = Callable[[str], str]


class Wanted(NamedTuple):
    """The calls that a grammar allows."""

    functions: Functions
    several: bool  # more than one call
    is_forced: bool  # False: the answer may have text and calls, or no call


WriteGrammar: TypeAlias = Callable[[Wanted, Mark], str]
_FREE = r"FREE: /(.|\n)*/"  # any text


@dataclass(frozen=True, slots=True)
class ToolForm:
    name: str
    parser: Callable[[Functions], ToolCallParser]
    grammar: WriteGrammar | None  # None: calls cannot be held to a grammar


def find_form(template: str) -> ToolForm | None:
    """By the source of a chat template, which shows the model how to write a call."""
    if kimi.SECTION in template:
        return KIMI
    if tagged.OPEN in template:
        return XML if "<function=" in template else HERMES
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA
    return None


def _hermes_grammar(wanted: Wanted, mark: Mark) -> str:
    calls = _json_calls(wanted.functions, "arguments")
    opened, closed = mark(tagged.OPEN), mark(tagged.CLOSE)
    call = f'call: {opened} "\\n" body "\\n" {closed}'
    if wanted.is_forced:
        start = 'start: call ("\\n" call)*' if wanted.several else "start: call"
        return "\n".join((start, call, *calls))
    if opened.startswith("<"):
        return "\n".join(("start: FREE (call FREE)*", call, _FREE, *calls))
    # Ordinary tokens write the mark, so it ends the free text as soon as it is complete.
    free_call = f'call: opened "\\n" body "\\n" {closed}'
    return "\n".join(
        ("start: call* FREE", free_call, f"opened[lazy]: FREE {opened}", _FREE, *calls)
    )


def _llama_grammar(wanted: Wanted, mark: Mark) -> str:
    bodies = 'body ("; " body)*' if wanted.several else "body"
    calls = _json_calls(wanted.functions, "parameters")
    if wanted.is_forced:
        return "\n".join((f"start: {bodies}", *calls))
    return "\n".join((f"start: {bodies} | FREE", r"FREE: /([^{](.|\n)*)?/", *calls))


def _kimi_grammar(wanted: Wanted, mark: Mark) -> str:
    bodies = []
    for index, function in enumerate(wanted.functions):
        id_ = json.dumps(f"functions.{function['name']}:")
        bodies.append(
            f"body_{index}: {mark(kimi.CALL)} {id_} /[0-9]{{1,3}}/ {mark(kimi.ARGUMENTS)} "
            f"%json {_schema(function)} {mark(kimi.CALL_END)}"
        )
    repeated = "body+" if wanted.several else "body"
    section = f"section: {mark(kimi.SECTION)} {repeated} {mark(kimi.SECTION_END)}"
    start = ("start: section",) if wanted.is_forced else ("start: FREE section?", _FREE)
    return "\n".join((*start, section, _alternatives(wanted.functions), *bodies))


def _json_calls(functions: Functions, arguments_key: str) -> list[str]:
    bodies = []
    for index, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"])}, "{arguments_key}": '
        bodies.append(f'body_{index}: {json.dumps(head)} %json {_schema(function)} "}}"')
    return [_alternatives(functions), *bodies]


def _alternatives(functions: Functions) -> str:
    return "body: " + " | ".join(f"body_{index}" for index in range(len(functions)))


def _schema(function: Mapping[str, Any]) -> str:
    return json.dumps(function.get("parameters") or {"type": "object", "properties": {}})


HERMES = ToolForm("hermes", lambda functions: tagged.TaggedCalls(), _hermes_grammar)
KIMI = ToolForm("kimi", lambda functions: kimi.KimiCalls(), _kimi_grammar)
LLAMA = ToolForm("llama", lambda functions: llama.LlamaCalls(), _llama_grammar)
XML = ToolForm("xml", XmlCalls, None)
