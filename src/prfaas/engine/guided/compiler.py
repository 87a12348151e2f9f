"""Compiles grammars with llguidance, and follows answers with them.

Compiling takes milliseconds, of a large schema seconds, without the interpreter's lock. A compiled
grammar has taken a step, because an expression may be small and its automaton huge: such a grammar
is refused here, before anything is computed for its request.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer
from llguidance import grammar_from as convert_grammar

from prfaas.engine.guided import trial
from prfaas.engine.guided.description import MAX_CHARACTERS, GrammarDescription
from prfaas.engine.guided.limits import LIMITS
from prfaas.errors import EngineError, InputError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CACHED = 32  # compiled grammars
MAX_CACHED_CHARACTERS = 1 << 20  # of their descriptions
_SHOWN = 300  # characters of a library's message


class GrammarMatcher:
    """Follows one answer. Used by one thread at a time."""

    def __init__(
        self, matcher: LLMatcher, eos_token_ids: frozenset[int], stop_token_ids: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._ends = eos_token_ids | stop_token_ids
        # The library knows the others as ends.
        self._more_ends = np.array(sorted(stop_token_ids - eos_token_ids), dtype=np.int64)
        self._ended = False

    def allowed_bits(self) -> npt.NDArray[np.uint8] | None:
        if self._ended:
            return None
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return self._with_more_ends(bits) if len(self._more_ends) else bits

    def consume(self, token: int) -> None:
        if self._ended:
            return
        if token in self._ends:
            self._ended = True
            return
        self._matcher.consume_token(token)
        self._check()

    def _with_more_ends(self, bits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        allowed = np.unpackbits(bits, bitorder="little")
        allowed[self._more_ends] = self._matcher.is_accepting()
        return np.packbits(allowed, bitorder="little")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(
                f"the answer cannot follow its grammar: {_shown(self._matcher.get_error())}"
            )


class CompiledGrammar:
    """Immutable; any thread may ask for a matcher."""

    def __init__(self, start: LLMatcher, ends: frozenset[int], field: str) -> None:
        self._start = start
        self._ends = ends
        self.field = field

    def __repr__(self) -> str:
        return f"CompiledGrammar(field={self.field!r})"

    def matcher(self, stop_token_ids: frozenset[int] = frozenset()) -> GrammarMatcher:
        return GrammarMatcher(self._start.deep_copy(), self._ends, stop_token_ids)

    def of_field(self, field: str) -> CompiledGrammar:
        """The same grammar, requested with another field."""
        return CompiledGrammar(self._start, self._ends, field)


class GrammarCompiler:
    """For one model. Any thread may use it."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        """Takes seconds for a large vocabulary, and holds the interpreter: call it before the
        process serves requests.

        `tokenizer_json`: the text of tokenizer.json. `vocab_size`: of the tokenizer or of the
        model's logits, whichever is larger; a grammar does not allow rows of the logits that are
        not tokens."""
        self._ends = eos_token_ids
        self._lock = threading.Lock()  # for the cache
        self._cache: OrderedDict[tuple[str, ...], CompiledGrammar] = OrderedDict()
        try:
            self._tokenizer: LLTokenizer | None = LLTokenizer(
                tokenizer_json,
                n_vocab=vocab_size,
                eos_token=sorted(eos_token_ids),
            )
        except ValueError as error:
            self._tokenizer = None
            self._problem = _shown(str(error))

    def compile(self, description: GrammarDescription) -> CompiledGrammar:
        """InputError names the field of the request."""
        if len(description.text) > MAX_CHARACTERS:
            raise InputError(
                f"{len(description.text)} characters are more than {MAX_CHARACTERS}",
                where=description.field,
                fix="use a smaller schema, expression or grammar",
            )
        with self._lock:
            known = self._cache.get(description.key)
            if known is not None:
                self._cache.move_to_end(description.key)
        if known is None:
            known = self._compiled(description)
            with self._lock:
                self._keep(description.key, known)
        return known.of_field(description.field)

    def _compiled(self, description: GrammarDescription) -> CompiledGrammar:
        where = description.field
        if self._tokenizer is None:
            raise InputError(
                f"grammars do not support this model's tokenizer: {self._problem}",
                where=where,
                fix="leave the field out",
            )
        try:
            source = _source(description)
        except (ValueError, RecursionError) as error:
            raise InputError(_shown(str(error)), where=where) from None
        if len(source) >= trial.MIN_CHARACTERS and not trial.passes(source):
            raise InputError(
                "it is too complex to compile", where=where, fix="use fewer or shorter rules"
            )
        start = LLMatcher(self._tokenizer, source, log_level=0, limits=LIMITS)
        problem = start.get_error() or self._problem_of_first_steps(start)
        if problem:
            raise InputError(
                f"it is not valid, not supported or too complex: {_shown(problem)}", where=where
            )
        return CompiledGrammar(start, self._ends, where)

    def _problem_of_first_steps(self, start: LLMatcher) -> str:
        """Computes the masks of the first step, which matchers then have, and of a second one."""
        bits = np.frombuffer(start.compute_bitmask(), dtype=np.uint8)
        second = start.deep_copy()
        for token in np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist():
            if token not in self._ends:
                second.consume_token(token)
                second.compute_bitmask()
                break
        return start.get_error() or second.get_error()

    def _keep(self, key: tuple[str, ...], grammar: CompiledGrammar) -> None:
        self._cache[key] = grammar
        while (
            len(self._cache) > MAX_CACHED
            or sum(len(text) for _, text, *_ in self._cache) > MAX_CACHED_CHARACTERS
        ):
            self._cache.popitem(last=False)


def _source(description: GrammarDescription) -> str:
    """The text that llguidance compiles. ValueError when it cannot be made."""
    text = description.text
    match description.kind:
        case "json":
            options: JsonCompileOptions = {"whitespace_flexible": description.any_whitespace}
            if description.whitespace_pattern is not None:
                options["whitespace_pattern"] = description.whitespace_pattern
            return LLMatcher.grammar_from_json_schema(text, overrides=options)
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            choices = (json.dumps(choice, ensure_ascii=False) for choice in json.loads(text))
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
        case "grammar":
            return convert_grammar("grammar", text)
        case "lark":
            return LLMatcher.grammar_from_lark(text)


def _shown(message: str) -> str:
    line = " ".join(message.replace("<non-verbose/>", "").split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."
