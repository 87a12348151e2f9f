"""The forms of tool calls that are known, found by what a chat template says. Pure.

A grammar is in llguidance's dialect of Lark. It forces calls in the form that the parser reads.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from prfaas.text.tool_calls import kimi, llama, tagged
from prfaas.text.tool_calls.pieces import ToolCallParser
from prfaas.text.tool_calls.xml_calls import XmlCalls

Functions: TypeAlias = Sequence[Mapping[str, Any]]  # `name`, and perhaps `parameters`
# From a mark to its text in a grammar: marks may be special tokens, which no text can write.
Mark: TypeAlias = Callable[[str], str]
# From the functions, the marks, and whether several calls may be made.
WriteGrammar: TypeAlias = Callable[[Functions, Mark, bool], str]


@dataclass(frozen=True, slots=True)
class ToolForm:
    name: str
    parser: Callable[[Functions], ToolCallParser]
    grammar: WriteGrammar | None  # None: calls cannot be forced


def find_form(template: str) -> ToolForm | None:
    """By the source of a chat template, which shows the model how to write a call."""
    if kimi.SECTION in template:
        return KIMI
    if tagged.OPEN in template:
        return XML if "<function=" in template else HERMES
    if "<|start_header_id|>" in template and '"parameters"' in template:
        return LLAMA
    return None


def _hermes_grammar(functions: Functions, mark: Mark, several: bool) -> str:
    calls = _json_calls(functions, "arguments")
    call = f'call: {mark(tagged.OPEN)} "\\n" body "\\n" {mark(tagged.CLOSE)}'
    start = 'start: call ("\\n" call)*' if several else "start: call"
    return "\n".join((start, call, *calls))


def _llama_grammar(functions: Functions, mark: Mark, several: bool) -> str:
    start = 'start: body ("; " body)*' if several else "start: body"
    return "\n".join((start, *_json_calls(functions, "parameters")))


def _kimi_grammar(functions: Functions, mark: Mark, several: bool) -> str:
    begin, end = mark(kimi.SECTION), mark(kimi.SECTION_END)
    start = f"start: {begin} body{'+' if several else ''} {end}"
    bodies = []
    for index, function in enumerate(functions):
        id_ = json.dumps(f"functions.{function['name']}:")
        bodies.append(
            f"body_{index}: {mark(kimi.CALL)} {id_} /[0-9]{{1,3}}/ {mark(kimi.ARGUMENTS)} "
            f"%json {_schema(function)} {mark(kimi.CALL_END)}"
        )
    return "\n".join((start, _alternatives(functions), *bodies))


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
