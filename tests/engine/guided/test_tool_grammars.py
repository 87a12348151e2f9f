"""Grammars of tool calls: what they allow, with marks that are text and marks that are tokens."""

from __future__ import annotations

import pytest

from prfaas.engine.checkpoint.tokenizer import token_id
from prfaas.engine.guided.compiler import GrammarMatcher
from prfaas.errors import EngineError
from prfaas.text.tool_calls import CallStart, Wanted, kimi
from prfaas.text.tool_calls.forms import HERMES, KIMI, LLAMA, ToolForm
from tests.engine.guided.test_compiler import ENDS, allowed, compiled

FUNCTIONS = [
    {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"n": {"type": "integer"}},
            "required": ["n"],
            "additionalProperties": False,
        },
    },
    {"name": "g"},
]
HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"n":1}}\n</tool_call>'
LLAMA_CALL = '{"name": "f", "parameters": {"n":1}}'
KIMI_CALL = (
    f'{kimi.SECTION}{kimi.CALL}functions.f:0{kimi.ARGUMENTS}{{"n":1}}{kimi.CALL_END}'
    f"{kimi.SECTION_END}"
)
CALLS = {"hermes": (HERMES, HERMES_CALL), "llama": (LLAMA, LLAMA_CALL), "kimi": (KIMI, KIMI_CALL)}
# Special tokens of the vocabulary stand for the marks.
TOKENS = {
    "<tool_call>": token_id("<|extra_0|>"),
    "</tool_call>": token_id("<|extra_1|>"),
    kimi.SECTION: token_id("<|bos|>"),
    kimi.SECTION_END: token_id("<|pad|>"),
    kimi.CALL: token_id("<|extra_0|>"),
    kimi.ARGUMENTS: token_id("<|extra_1|>"),
    kimi.CALL_END: token_id("<|extra_2|>"),
}


def as_text(mark: str) -> str:
    return f'"{mark}"'


def as_token(mark: str) -> str:
    return f"<[{TOKENS[mark]}]>"


def tokens(text: str, *, special: bool) -> list[int]:
    found: list[int] = []
    while text:
        mark = next((one for one in TOKENS if special and text.startswith(one)), "")
        found += [TOKENS[mark]] if mark else text[0].encode()
        text = text[len(mark) or 1 :]
    return found


def follow(matcher: GrammarMatcher, ids: list[int]) -> bool:
    """Whether the text may end there. EngineError where the grammar does not allow it."""
    for token in ids:
        matcher.consume(token)
    return allowed(matcher) >= ENDS


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_forced_and_free_calls(name: str, special: bool) -> None:
    form, call = CALLS[name]
    mark = as_token if special else as_text

    def may_end(text: str, *, is_forced: bool, several: bool = True) -> bool:
        assert form.grammar is not None
        grammar = form.grammar(Wanted(FUNCTIONS, several, is_forced), mark)
        return follow(compiled("lark", grammar).matcher(), tokens(text, special=special))

    assert may_end(call, is_forced=True)
    with pytest.raises(EngineError):
        may_end("Hi", is_forced=True)
    if special or form is not KIMI:  # the marks of Kimi K2 are special tokens
        assert may_end(call, is_forced=False) and may_end("Hi <b>", is_forced=False)
        wrong = call.replace('{"n":1}', '{"n":"1"}')
        with pytest.raises(EngineError):
            may_end(wrong, is_forced=False)
    unknown = call.replace('"f"', '"h"').replace(".f:", ".h:")
    with pytest.raises(EngineError):
        may_end(unknown, is_forced=True)


@pytest.mark.parametrize(
    ("form", "text"),
    [(HERMES, f"{HERMES_CALL}\n{HERMES_CALL}"), (LLAMA, f"{LLAMA_CALL}; {LLAMA_CALL}")],
)
def test_several_calls(form: ToolForm, text: str) -> None:
    assert form.grammar is not None
    several = compiled("lark", form.grammar(Wanted(FUNCTIONS, True, True), as_text))
    assert follow(several.matcher(), tokens(text, special=False))
    one = compiled("lark", form.grammar(Wanted(FUNCTIONS, False, True), as_text))
    with pytest.raises(EngineError):
        follow(one.matcher(), tokens(text, special=False))


def test_any_name_of_a_function() -> None:
    """And the parser reads what the grammar has forced."""
    name = 'a"b\\\n é😀 </tool_call> %json /x/'
    for form in (HERMES, LLAMA):
        assert form.grammar is not None
        grammar = form.grammar(Wanted([{"name": name}], False, True), as_text)
        matcher, text = compiled("lark", grammar).matcher(), bytearray()
        while not allowed(matcher) >= ENDS:
            # The bias towards the object's end keeps the arguments empty.
            choices = allowed(matcher) - {ord(blank) for blank in " \n\r\t"} or allowed(matcher)
            token = ord("}") if ord("}") in choices else min(choices)
            matcher.consume(token)
            text.append(token)
        parser = form.parser([])
        start, *_ = [*parser.push(text.decode()), *parser.finish()]
        assert start == CallStart(0, name)
