"""Grammars over a byte-level vocabulary: masks against brute force, limits, the cache."""

from __future__ import annotations

import json
import random
import re
from itertools import product
from typing import Any

import numpy as np
import pytest

from prfaas.engine.checkpoint.tokenizer import EOS, VOCAB_SIZE, build_tokenizer, token_id
from prfaas.engine.guided import GrammarDescription
from prfaas.engine.guided import compiler as guided
from prfaas.engine.guided.compiler import CompiledGrammar, GrammarCompiler, GrammarMatcher
from prfaas.engine.guided.description import MAX_CHARACTERS, Kind
from prfaas.errors import EngineError, InputError

ENDS = frozenset({token_id(EOS), token_id("<|im_end|>")})
PADDED = VOCAB_SIZE + 21  # rows of the logits, more than the tokenizer has tokens
COMPILER = GrammarCompiler(build_tokenizer().to_str(), PADDED, ENDS)
ALPHABET = "abc"


def compiled(kind: Kind, text: str, **more: Any) -> CompiledGrammar:
    return COMPILER.compile(GrammarDescription(kind, text, "field", **more))


def allowed(matcher: GrammarMatcher) -> set[int]:
    bits = matcher.allowed_bits()
    assert bits is not None
    return set(np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist())


def written(grammar: CompiledGrammar, seed: int, most: int = 400) -> str:
    """A random text that the grammar allows, up to the end of the text."""
    matcher, draw, text = grammar.matcher(), random.Random(seed), bytearray()
    for _ in range(most):
        token = draw.choice(sorted(allowed(matcher)))
        matcher.consume(token)
        if token in ENDS:
            return text.decode()
        text.append(token)
    raise AssertionError(f"no end after {bytes(text)!r}")


@pytest.mark.parametrize(
    ("kind", "text", "members"),
    [
        ("regex", "a(b|c){1,2}a?", None),
        ("regex", "(ab|ac)?b", None),
        ("choice", '["ab", "abc", "b", "cab"]', {"ab", "abc", "b", "cab"}),
        ("grammar", 'root ::= "a" mid "c" | "b"\nmid ::= "b" | "bb"', {"abc", "abbc", "b"}),
        ("grammar", 'start: "a" mid "c" | "b"\nmid: "b" | "bb"', {"abc", "abbc", "b"}),
    ],
)
def test_masks_agree_with_brute_force(kind: Kind, text: str, members: set[str] | None) -> None:
    """Every text of up to four letters, letter by letter."""
    words = ["".join(word) for n in range(5) for word in product(ALPHABET, repeat=n)]
    language = members or {word for word in words if re.fullmatch(text, word)}
    prefixes = {word[:length] for word in language for length in range(len(word) + 1)}
    grammar = compiled(kind, text)
    for prefix in prefixes:
        matcher = grammar.matcher()
        for letter in prefix:
            matcher.consume(ord(letter))
        follow = {ord(letter) for letter in ALPHABET if prefix + letter in prefixes}
        assert allowed(matcher) == follow | (ENDS if prefix in language else set()), prefix


def test_texts_that_a_schema_allows_follow_it() -> None:
    schema = {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 999},
            "tag": {"enum": ["x", "yy", 'quote " and ümlaut']},
            "code": {"type": "string", "pattern": "^[a-f]{2,4}$"},
            "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
        },
        "required": ["id", "tag", "list"],
        "additionalProperties": False,
    }
    grammar = compiled("json", json.dumps(schema), any_whitespace=False)
    for seed in range(30):
        value = json.loads(written(grammar, seed))
        assert {"id", "tag", "list"} <= value.keys() <= {"id", "tag", "list", "code"}
        assert type(value["id"]) is int and 0 <= value["id"] <= 999
        assert value["tag"] in schema["properties"]["tag"]["enum"]  # type: ignore[index]
        assert len(value["list"]) <= 3 and all(type(one) is bool for one in value["list"])
        assert re.fullmatch("[a-f]{2,4}", value.get("code", "ab"))


def test_whitespace_of_json() -> None:
    schema = '{"type": "array", "items": {"const": 1}, "minItems": 2, "maxItems": 2}'
    none = written(compiled("json", schema, any_whitespace=False), 0)
    assert none == "[1,1]"
    some = {written(compiled("json", schema, whitespace_pattern=" ?"), seed) for seed in range(20)}
    assert len(some) > 1 and all(json.loads(text) == [1, 1] for text in some)
    matcher = compiled("json", schema).matcher()
    matcher.consume(ord("["))
    assert ord("\n") in allowed(matcher)


def test_characters_of_several_bytes() -> None:
    grammar = compiled("regex", "[äé€😀]{3}")
    texts = {written(grammar, seed) for seed in range(10)}
    assert all(len(text) == 3 and set(text) <= set("äé€😀") for text in texts)


def test_after_the_end_every_token_is_allowed() -> None:
    """As in vLLM: a request with ignore_eos continues."""
    matcher = compiled("choice", '["a"]').matcher()
    matcher.consume(ord("a"))
    assert allowed(matcher) == ENDS
    matcher.consume(token_id(EOS))
    assert matcher.allowed_bits() is None
    matcher.consume(ord("z"))


def test_stop_tokens_are_ends() -> None:
    """As in vLLM: a stop token is allowed where the grammar is complete, and only there."""
    stops = frozenset({ord("b"), ord("z")})
    matcher = compiled("choice", '["a", "acd", "bcd"]').matcher(stops)
    assert allowed(matcher) == {ord("a")}
    matcher.consume(ord("a"))
    assert allowed(matcher) == {ord("c")} | ENDS | stops
    matcher.consume(ord("z"))
    assert matcher.allowed_bits() is None


def test_a_token_that_the_grammar_does_not_allow_is_an_error() -> None:
    with pytest.raises(EngineError, match="cannot follow its grammar"):
        compiled("choice", '["a"]').matcher().consume(ord("b"))


def test_matchers_do_not_share_their_place() -> None:
    grammar = compiled("choice", '["ab"]')
    first, second = grammar.matcher(), grammar.matcher()
    first.consume(ord("a"))
    assert allowed(second) == {ord("a")} and allowed(first) == {ord("b")}


def chained_rules(count: int) -> str:
    rules = "\n".join(f"r{number}: r{number + 1}" for number in range(count))
    return f'start: r0\n{rules}\nr{count}: "a"'


def chained_definitions(count: int) -> str:
    chain = {
        f"a{number}": {"type": "array", "items": {"$ref": f"#/$defs/a{number + 1}"}}
        for number in range(count)
    }
    return json.dumps({"$defs": {**chain, f"a{count}": {"const": 1}}, "$ref": "#/$defs/a0"})


def test_long_grammars_can_be_used() -> None:
    assert allowed(compiled("lark", chained_rules(300)).matcher()) == {ord("a")}
    assert allowed(compiled("json", chained_definitions(100)).matcher()) == {ord("[")}


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "(a{1000}){1000}", "too complex"),
        ("json", '{"type": "foo"}', "Invalid type: foo"),
        ("json", '{"not": {}}', "Unimplemented keys"),
        ("json", '{"$ref": "http://example.org/schema"}', "not valid"),
        ("json", '{"type": "string", "minLength": 5, "maxLength": 2}', "Unsatisfiable"),
        ("grammar", "start: missing", "unknown name"),
        ("grammar", "((", "GBNF"),
        ("regex", "a" * (MAX_CHARACTERS + 1), "more than"),
        # The library ends its process with these.
        ("grammar", chained_rules(5000), "too complex to compile"),
        ("json", chained_definitions(2000), "too complex to compile"),
    ],
)
def test_what_cannot_be_used_names_its_field(kind: Kind, text: str, problem: str) -> None:
    with pytest.raises(InputError, match=re.escape(problem)) as caught:
        compiled(kind, text)
    assert caught.value.where == "field" and len(str(caught.value)) < 600


@pytest.mark.parametrize("ends", [ENDS, frozenset()])
def test_a_tokenizer_that_grammars_do_not_support(ends: frozenset[int]) -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    known = build_tokenizer() if not ends else words
    compiler = GrammarCompiler(known.to_str(), PADDED, ends)
    with pytest.raises(InputError, match="tokenizer") as caught:
        compiler.compile(GrammarDescription("regex", "a", "structured_outputs.regex"))
    assert caught.value.where == "structured_outputs.regex"


def test_the_cache_is_bounded_and_keeps_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(build_tokenizer().to_str(), PADDED, ENDS)
    made: list[GrammarDescription] = []
    source = guided._source

    def counted(description: GrammarDescription) -> str:
        made.append(description)
        return source(description)

    monkeypatch.setattr(guided, "_source", counted)
    used = GrammarDescription("regex", "used", "one")
    for number in range(2 * guided.MAX_CACHED):
        assert compiler.compile(used).field == "one"
        compiler.compile(GrammarDescription("regex", f"x{number}", "other"))
    assert len(made) == 1 + 2 * guided.MAX_CACHED
    compiler.compile(GrammarDescription("regex", "x0", "other"))
    assert len(made) == 2 + 2 * guided.MAX_CACHED
    assert compiler.compile(GrammarDescription("regex", "used", "another")).field == "another"
    assert len(made) == 2 + 2 * guided.MAX_CACHED
