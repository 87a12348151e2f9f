"""Grammars over a byte-level vocabulary: masks against brute force, limits, the cache."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prfaas.engine.checkpoint.tokenizer import EOS, VOCAB_SIZE, build_tokenizer, token_id
from prfaas.engine.guided import GrammarDescription, host_process, limits
from prfaas.engine.guided import compiler as guided
from prfaas.engine.guided.compiler import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarConnection,
    GrammarMatcher,
)
from prfaas.engine.guided.description import MAX_CHARACTERS, Kind
from prfaas.errors import EngineError, InputError
from prfaas.types import NotNow
from tests.waiting import HANG_S, wait_until

ENDS = frozenset({token_id(EOS), token_id("<|im_end|>")})
PADDED = VOCAB_SIZE + 21  # rows of the logits, more than the tokenizer has tokens
COMPILER = GrammarCompiler(build_tokenizer().to_str(), PADDED, ENDS)
ALPHABET = "abc"
MOST_NICE = 19


def compiled(kind: Kind, text: str, **more: Any) -> CompiledGrammar:
    made = COMPILER.compile(GrammarDescription(kind, text, "field", **more))
    assert isinstance(made, CompiledGrammar)
    return made


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
    matcher = compiled("choice", '["a"]').matcher()
    matcher.consume(ord("b"))
    with pytest.raises(EngineError, match="cannot follow its grammar"):
        matcher.allowed_bits()


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


ENDLESS = "start: T\nT: /.*a.{60}.*/ & /.*b.{61}.*/ & ~/.*c.{62}.*/ & ~/.*d.{50}/"


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
        ("grammar", chained_rules(5000), "too complex"),
        ("json", chained_definitions(2000), "too complex"),
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
    with closing(GrammarCompiler(known.to_str(), PADDED, ends)) as compiler:
        for _ in range(2):
            with pytest.raises(InputError, match="tokenizer") as caught:
                compiler.compile(GrammarDescription("regex", "a", "structured_outputs.regex"))
            assert caught.value.where == "structured_outputs.regex"
        assert compiler.host_pid is None


def test_the_cache_is_bounded_and_keeps_what_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[GrammarDescription] = []
    compile_now = GrammarConnection.compile

    def counted(connection: GrammarConnection, description: GrammarDescription) -> str | None:
        made.append(description)
        return compile_now(connection, description)

    monkeypatch.setattr(GrammarConnection, "compile", counted)
    monkeypatch.setattr(guided, "MAX_CACHED", 5)
    with own_compiler() as compiler:
        for number in range(10):
            assert field_of(compiler, "used", "one") == "one"
            field_of(compiler, f"x{number}", "other")
            wait_until(lambda: len(children_of(compiler)) <= 5)
        assert len(made) == 1 + 10
        field_of(compiler, "x0", "other")
        assert len(made) == 2 + 10
        assert field_of(compiler, "used", "another") == "another"
        assert len(made) == 2 + 10


@contextmanager
def own_compiler() -> Iterator[GrammarCompiler]:
    """With a host of its own, which ends here with all its copies."""
    with closing(GrammarCompiler(build_tokenizer().to_str(), PADDED, ENDS)) as compiler:
        compiler.start()
        yield compiler
        copies = [compiler.host_pid, *children_of(compiler)]
    wait_until(lambda: not any(is_running(process) for process in copies if process is not None))


def field_of(compiler: GrammarCompiler, regex: str, field: str) -> str:
    made = compiler.compile(GrammarDescription("regex", regex, field))
    assert isinstance(made, CompiledGrammar)
    return made.field


def children_of(compiler: GrammarCompiler) -> list[int]:
    assert compiler.host_pid is not None
    return children_of_process(compiler.host_pid)


def children_of_process(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_grammar_that_takes_too_much_ends_alone_and_is_known_then() -> None:
    """Its process ends within its limits; another grammar is compiled and followed beside it."""
    threads = threading.active_count()
    with own_compiler() as compiler, ThreadPoolExecutor(1) as other:
        endless = GrammarDescription("grammar", ENDLESS, "structured_outputs.grammar")
        refused = other.submit(compiler.compile, endless)
        wait_until(lambda: len(children_of(compiler)) == 1)
        made = compiler.compile(GrammarDescription("choice", '["ab"]', "field"))
        assert isinstance(made, CompiledGrammar)
        matcher = made.matcher()
        matcher.consume(ord("a"))
        assert allowed(matcher) == {ord("b")}
        with pytest.raises(InputError, match="too complex") as caught:
            refused.result(HANG_S)
        assert caught.value.where == "structured_outputs.grammar"
        wait_until(lambda: len(children_of(compiler)) == 1)
        with pytest.raises(InputError, match="too complex"):
            compiler.known(endless)
        del made, matcher
        compiler.compile(GrammarDescription("choice", '["a"]', "field"))
    assert threading.active_count() == threads


def test_a_grammar_that_takes_too_much_later_fails_its_answers_alone() -> None:
    with own_compiler() as compiler:
        made = compiler.compile(GrammarDescription("regex", "ab", "field"))
        assert isinstance(made, CompiledGrammar)
        (process,) = children_of(compiler)
        other = compiler.compile(GrammarDescription("choice", '["a"]', "field"))
        assert isinstance(other, CompiledGrammar)
        matcher = made.matcher()
        assert allowed(matcher) == {ord("a")}
        os.kill(process, signal.SIGXCPU)  # as the kernel does
        wait_until(lambda: not made.is_alive)
        with pytest.raises(EngineError, match="too much time or memory"):
            matcher.consume(ord("a"))
            matcher.allowed_bits()
        with pytest.raises(EngineError, match="too much time or memory"):
            made.matcher()
        assert allowed(other.matcher()) == {ord("a")}
        with pytest.raises(InputError, match="too complex"):  # and not tried again
            compiler.compile(GrammarDescription("regex", "ab", "field"))


def test_a_host_that_ended_is_started_again() -> None:
    with own_compiler() as compiler:
        before = compiler.compile(GrammarDescription("regex", "ab", "field"))
        assert isinstance(before, CompiledGrammar) and compiler.host_pid is not None
        first = compiler.host_pid
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not before.is_alive)  # its copies end with it
        with pytest.raises(EngineError, match="too much time or memory"):
            before.matcher()
        again = compiler.compile(GrammarDescription("regex", "ab", "field"))
        assert isinstance(again, CompiledGrammar) and compiler.host_pid not in (None, first)
        assert allowed(again.matcher()) == {ord("a")}


KILLED = """
import sys, threading
from prfaas.engine.guided import GrammarDescription
from tests.engine.guided.test_compiler import COMPILER, ENDLESS

COMPILER.start()
kept = COMPILER.compile(GrammarDescription("regex", "a", "field"))
endless = GrammarDescription("grammar", ENDLESS, "field")
threading.Thread(target=COMPILER.compile, args=(endless,)).start()
print(COMPILER.host_pid, flush=True)
sys.stdin.read()
"""


def test_all_processes_end_with_a_node_that_is_killed() -> None:
    command = [sys.executable, "-c", KILLED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as node:
        assert node.stdout is not None
        host = int(node.stdout.readline())
        wait_until(lambda: len(children_of_process(host)) == 2)
        processes = [host, *children_of_process(host)]
        node.kill()
    wait_until(lambda: not any(map(is_running, processes)))


# Each step takes longer than the one before: the text has ever more derivations.
AMBIGUOUS = "start: s\ns: A | s s | s s s | s s s s\nA: /a/"
# Each new end of the text is a state that is kept.
GROWING = "start: T\nT: /(.|\\n)*a(.|\\n){12}/"


def with_limits(monkeypatch: pytest.MonkeyPatch, **changed: float) -> None:
    """Hosts that start from now on. What is not named here ends no process."""
    values = {"COMPILE_CPU_S": 1e6, "STEP_CPU_S": 1e6, "SPARE_CPU_S": 1e6} | changed
    settings = "; ".join(f"limits.{name} = {value!r}" for name, value in values.items())
    program = f"from prfaas.engine.guided import host, limits; {settings}; host.main()"
    monkeypatch.setattr(
        host_process,
        "module_command",
        # Tests find the processes by the module in their command line.
        lambda module, *arguments: [sys.executable, "-c", program, *arguments, module],
    )


@pytest.mark.parametrize(
    ("text", "steps", "changed"),
    [
        (AMBIGUOUS, 150, {"SPARE_CPU_S": limits.SPARE_CPU_S}),
        (AMBIGUOUS, 110, {"STEP_CPU_S": 0.01}),
        (GROWING, 1000, {"MEMORY_BYTES": 2 << 20}),
    ],
    ids=["all steps", "a step", "memory"],
)
def test_later_steps_have_limits_and_end_their_grammar_alone(
    text: str, steps: int, changed: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_limits(monkeypatch, **changed)
    draw = random.Random(0)
    with own_compiler() as compiler:
        made = compiler.compile(GrammarDescription("grammar", text, "field"))
        other = compiler.compile(GrammarDescription("regex", "(ab)*", "field"))
        assert isinstance(made, CompiledGrammar) and isinstance(other, CompiledGrammar)
        matcher, beside = made.matcher(), other.matcher()
        with pytest.raises(EngineError, match="too much time or memory"):
            for number in range(steps):
                matcher.consume(draw.choice(b"a" if text == AMBIGUOUS else b"ab"))
                matcher.allowed_bits()
                beside.consume(b"ab"[number % 2])
                assert b"ba"[number % 2] in allowed(beside)
        wait_until(lambda: made.has_exceeded_limits)
        assert ord("a") in allowed(other.matcher())


def test_answers_that_only_begin_gain_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with_limits(monkeypatch, SPARE_CPU_S=0.0, MEAN_STEP_CPU_S=1e6)
    with own_compiler() as compiler:
        made = compiler.compile(GrammarDescription("regex", "a*", "field"))
        assert isinstance(made, CompiledGrammar)
        with pytest.raises(EngineError, match="too much time or memory"):
            for _ in range(100):
                made.matcher().allowed_bits()


def test_a_process_whose_compilation_is_late_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []

    def late(connection: GrammarConnection, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)  # so that it does not end by itself
        begun.append(pid)
        raise TimeoutError

    monkeypatch.setattr(GrammarConnection, "_wait_with_patience", late)
    with own_compiler() as compiler:
        with pytest.raises(InputError, match="compiling took longer"):
            compiler.compile(GrammarDescription("grammar", ENDLESS, "field"))
        wait_until(lambda: not is_running(begun[0]))


def test_a_process_that_has_the_number_of_a_grammars_process_is_not_taken_for_it() -> None:
    with own_compiler() as compiler:
        made = compiler.compile(GrammarDescription("regex", "a", "field"))
        assert isinstance(made, CompiledGrammar)
        (process,) = children_of(compiler)
        descriptor = made._connection._opened(process)
        assert descriptor is not None
        os.close(descriptor)
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: not made.is_alive)
        assert made._connection._opened(os.getpid()) is None


def test_a_grammar_that_takes_too_much_is_tried_again_after_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its step may have been slow for a reason that has gone."""
    now = time.monotonic
    with own_compiler() as compiler:
        description = GrammarDescription("regex", "ab", "field")
        made = compiler.compile(description)
        assert isinstance(made, CompiledGrammar)
        os.kill(children_of(compiler)[0], signal.SIGXCPU)  # as the kernel does
        wait_until(lambda: not made.is_alive)
        with pytest.raises(InputError, match="too complex"):
            compiler.known(description)
        monkeypatch.setattr(time, "monotonic", lambda: now() + 590)
        with pytest.raises(InputError, match="too complex"):
            compiler.known(description)
        monkeypatch.setattr(time, "monotonic", lambda: now() + 601)
        again = compiler.compile(description)
        assert isinstance(again, CompiledGrammar)
        assert allowed(again.matcher()) == {ord("a")}


def patient() -> int:
    """The niceness of an expensive grammar's process."""
    own = os.getpriority(os.PRIO_PROCESS, 0)
    if own == MOST_NICE:
        pytest.skip("these tests themselves take only what others leave")
    return min(MOST_NICE, own + limits.NICENESS)


def test_an_expensive_grammar_takes_what_others_leave() -> None:
    expected = patient()
    with own_compiler() as compiler, ThreadPoolExecutor(1) as threads:
        cheap = compiler.compile(GrammarDescription("regex", "a", "field"))
        (process,) = children_of(compiler)
        assert niceness(process) == os.getpriority(os.PRIO_PROCESS, 0)
        work = threads.submit(compiler.compile, GrammarDescription("grammar", ENDLESS, "field"))
        wait_until(lambda: expected in map(niceness, children_of(compiler)))
        wait_until(lambda: expected in map(session_niceness, children_of(compiler)))
        (process,) = [one for one in children_of(compiler) if niceness(one) == expected]
        os.kill(process, signal.SIGXCPU)  # as the kernel does, in a while
        with pytest.raises(InputError, match="too complex"):
            work.result()
        del cheap


def test_a_grammar_with_expensive_steps_takes_what_others_leave() -> None:
    expected = patient()
    with own_compiler() as compiler:
        made = compiler.compile(GrammarDescription("grammar", AMBIGUOUS, "field"))
        assert isinstance(made, CompiledGrammar)
        (process,) = children_of(compiler)
        matcher, steps = made.matcher(), 0
        assert niceness(process) == os.getpriority(os.PRIO_PROCESS, 0)
        while niceness(process) != expected:
            matcher.consume(ord("a"))
            matcher.allowed_bits()
            steps += 1
        assert steps > 10 and made.is_alive


def session_niceness(process: int) -> int | None:
    """What counts between processes of several sessions, where the kernel goes by sessions. The
    process is alone in its own."""
    try:
        if os.getsid(process) != process:
            return None
        if os.geteuid():  # the kernel may refuse a change soon after another one
            return niceness(process)
        return int(Path(f"/proc/{process}/autogroup").read_text().rpartition(" ")[2])
    except FileNotFoundError:  # this kernel does not go by sessions, or the process has ended
        return niceness(process)
    except ProcessLookupError:
        return None


def niceness(process: int) -> int | None:
    try:
        return os.getpriority(os.PRIO_PROCESS, process)
    except ProcessLookupError:
        return None


def test_grammars_in_use_have_bounds_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guided, "MAX_PROCESSES", 2)
    with own_compiler() as compiler:
        used = [compiler.compile(GrammarDescription("regex", text, "field")) for text in "ab"]
        assert isinstance(compiler.compile(GrammarDescription("regex", "c", "field")), NotNow)
        used.clear()
        assert field_of(compiler, "c", "field") == "field"


def test_an_answer_that_has_ended_leaves_nothing_in_the_process_of_its_grammar() -> None:
    grammar = compiled("regex", "a*")
    for _ in range(50):
        matcher = grammar.matcher()
        matcher.consume(ord("a"))
        del matcher
    grammar.matcher()
    assert len(grammar._connection._due) == 1
