"""Parsers of tool calls: each form, what is not a call, and any division of the text."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.text.tool_calls.forms import HERMES, KIMI, LLAMA, XML, ToolForm, find_form
from prfaas.text.tool_calls.json_call import MAX_HEADER
from prfaas.text.tool_calls.pieces import ArgumentsPiece, CallStart, Piece, TextPiece, joined

WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    },
}
FORMS = {"hermes": HERMES, "kimi": KIMI, "llama": LLAMA, "xml": XML}
# Pieces of texts that parsers must tell apart, in any order.
WORDS = st.sampled_from(
    [
        *(
            "<tool_call>",
            "</tool_call>",
            "<tool",
            "</",
            "\n",
            " ",
            ";",
            "hi",
            "ü",
            '"',
            "\\",
            "\\n",
        ),
        *(
            '{"name": "f", "arguments": ',
            '{"arguments": {}, "name": "g"}',
            "{",
            "}",
            "[",
            "]",
            "{}",
        ),
        *('{"a": "</tool_call>"}', '{"name": "f", "parameters": {"x": 1}}', '"name": "f"', ","),
        *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
        *("functions.f:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "<|python_tag|>"),
        *("<function=get_weather>", "</function>", "<parameter=days>", "</parameter>", "3", "true"),
    ]
)
FEW = settings(max_examples=30)


def read(form: ToolForm, *texts: str) -> list[Piece]:
    parser = form.parser([WEATHER])
    return joined([*(piece for text in texts for piece in parser.push(text)), *parser.finish()])


def text_and_calls(form: ToolForm, text: str) -> tuple[str, list[tuple[str, Any]]]:
    pieces = read(form, text)
    arguments = {piece.index: piece.text for piece in pieces if isinstance(piece, ArgumentsPiece)}
    calls = [
        (piece.name, json.loads(arguments[piece.index]))
        for piece in pieces
        if isinstance(piece, CallStart)
    ]
    return "".join(piece.text for piece in pieces if isinstance(piece, TextPiece)), calls


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def kimi(name: str, arguments: str, index: int = 0) -> str:
    return (
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{arguments}"
        "<|tool_call_end|>"
    )


TOKYO, PARIS = {"city": "Tokyo", "nested": {"a": [1, "}"]}}, {"city": 'a " b', "x": "</tool_call>"}
CALLS = [("get_weather", TOKYO), ("get_weather", PARIS)]
XML_CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\n5\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", "".join(hermes(n, json.dumps(a)) for n, a in CALLS), ("", CALLS)),
        ("hermes", "I look.\n" + hermes("f", "{}") + "\nafter", ("I look.\n", [("f", {})])),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}', ("", [("f", {"a": 1})])),
        ("hermes", "a < b <tool_cal", ("a < b <tool_cal", [])),
        ("hermes", "<tool_call>no</tool_call>", ("<tool_call>no</tool_call>", [])),
        (
            "hermes",
            '<tool_call>{"name": "f"}</tool_call>',
            ('<tool_call>{"name": "f"}</tool_call>', []),
        ),
        ("hermes", '<tool_call>{"a": tru<', ('<tool_call>{"a": tru<', [])),
        (
            "kimi",
            "hm<|tool_calls_section_begin|>"
            + "".join(kimi(n, json.dumps(a), i) for i, (n, a) in enumerate(CALLS))
            + "<|tool_calls_section_end|>",
            ("hm", CALLS),
        ),
        ("kimi", "only <| text", ("only <| text", [])),
        ("llama", '{"name": "f", "parameters": {"a": 1}}', ("", [("f", {"a": 1})])),
        (
            "llama",
            '<|python_tag|>{"name": "f", "parameters": {}}; {"name": "g", "arguments": {"b": 2}}',
            ("", [("f", {}), ("g", {"b": 2})]),
        ),
        ("llama", '{"city": "Tokyo"} is it', ('{"city": "Tokyo"} is it', [])),
        (
            "llama",
            ' say {"name": "f", "parameters": {}}',
            (' say {"name": "f", "parameters": {}}', []),
        ),
        ("xml", "so " + XML_CALL + "\n", ("so ", [("get_weather", {"city": "5", "days": 3})])),
        ("xml", "<tool_call>\n<function=f>\n</function>\n</tool_call>", ("", [("f", {})])),
        ("xml", "<tool_call>\n<function=f", ("<tool_call>\n<function=f", [])),
    ],
)
def test_calls_of_each_form(form: str, text: str, expected: tuple[str, Any]) -> None:
    assert text_and_calls(FORMS[form], text) == expected


def test_an_id_that_the_model_writes_is_kept() -> None:
    start, *_ = read(KIMI, "<|tool_calls_section_begin|>" + kimi("get_weather", "{}", 7))
    assert start == CallStart(0, "get_weather", "functions.get_weather:7")


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@FEW
@given(words=st.lists(WORDS, max_size=14), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_division_of_a_text_gives_the_same_pieces(
    form: ToolForm, words: list[str], cuts: list[int]
) -> None:
    text = "".join(words)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    whole = read(form, text)
    assert read(form, *(text[a:b] for a, b in pairwise(places))) == whole
    assert read(form, *text) == whole


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@FEW
@given(words=st.lists(WORDS, max_size=14))
def test_text_without_a_call_is_passed_on(form: ToolForm, words: list[str]) -> None:
    text = "".join(words)
    pieces = read(form, text)
    if form is not KIMI and not any(isinstance(piece, CallStart) for piece in pieces):
        assert pieces == ([TextPiece(text)] if text else [])
    starts = [piece.index for piece in pieces if isinstance(piece, CallStart)]
    assert starts == list(range(len(starts)))


def test_text_and_arguments_are_passed_on_as_they_arrive() -> None:
    parser = HERMES.parser([])
    assert parser.push("Hello <tool_") == [TextPiece("Hello ")]
    assert parser.push('call>{"name": "f", "argu') == []
    assert parser.push('ments": {"a": "lo') == [CallStart(0, "f"), ArgumentsPiece(0, '{"a": "lo')]
    assert parser.push('ng"}}') == [ArgumentsPiece(0, 'ng"}')]
    assert parser.push("</tool_call>") == [] and parser.finish() == []


def test_an_unfinished_call_stays_unfinished() -> None:
    assert read(HERMES, '<tool_call>{"name": "f", "arguments": {"a": [1, ') == [
        CallStart(0, "f"),
        ArgumentsPiece(0, '{"a": [1, '),
    ]


def test_a_name_after_a_long_beginning_is_found_at_the_end() -> None:
    long = {"text": "x" * MAX_HEADER}
    text = "<tool_call>" + json.dumps({"arguments": long, "name": "f"}) + "</tool_call>"
    assert text_and_calls(HERMES, text) == ("", [("f", long)])
    assert read(HERMES, *text) == read(HERMES, text)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ('{"name": <function-name>, "arguments": <args>}\n</tool_call> <tool_call>', HERMES),
        ("<tool_call>\n<function=example>\n<parameter=a>", XML),
        ("<|tool_calls_section_begin|>", KIMI),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary}', LLAMA),
        ("{% for message in messages %}", None),
    ],
)
def test_the_form_is_found_by_the_template(template: str, form: ToolForm | None) -> None:
    assert find_form(template) is form
