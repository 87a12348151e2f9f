"""Compiling is bounded: grammars that wait, the time of one, and nodes that cannot compile."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from prfaas.engine.api import EngineLimits
from prfaas.engine.checkpoint.tokenizer import EOS, VOCAB_SIZE, token_id
from prfaas.engine.guided import GrammarDescription
from prfaas.engine.guided.compiler import CompiledGrammar, GrammarCompiler
from prfaas.errors import InputError, RequestError
from prfaas.node.structured import grammars as module
from prfaas.node.structured.grammars import MAX_WAITING, Grammars
from tests.node.local_api import BYTES
from tests.waiting import HANG_S

LIMITS = EngineLimits(1000, VOCAB_SIZE, 4, 4, eos_token_ids=frozenset({token_id(EOS)}))
REGEX = GrammarDescription("regex", "a", "structured_outputs.regex")


class Paused:
    """Compiling waits until the test lets it continue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        compile_now = GrammarCompiler.compile

        def paused(compiler: GrammarCompiler, given: GrammarDescription) -> CompiledGrammar:
            assert self.go_on.wait(HANG_S)
            return compile_now(compiler, given)

        monkeypatch.setattr(GrammarCompiler, "compile", paused)


async def test_the_number_of_waiting_grammars_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    paused, grammars = Paused(monkeypatch), Grammars(BYTES, LIMITS)
    waiting = [asyncio.ensure_future(grammars.compiled(REGEX)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)  # all of them start
    try:
        with pytest.raises(RequestError) as caught:
            await grammars.compiled(REGEX)
        assert (caught.value.status, caught.value.code) == (503, "overloaded")
    finally:
        paused.go_on.set()
    made = await asyncio.gather(*waiting)
    assert all(grammar is not None and grammar.field == REGEX.field for grammar in made)
    assert await grammars.compiled(REGEX) is not None


async def test_the_time_of_compiling_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    paused, grammars = Paused(monkeypatch), Grammars(BYTES, LIMITS)
    monkeypatch.setattr(module, "COMPILE_S", 0.01)
    try:
        with pytest.raises(InputError, match="longer than") as caught:
            await grammars.compiled(REGEX)
        assert caught.value.where == REGEX.field
    finally:
        paused.go_on.set()


@pytest.mark.parametrize("problem", ["tokenizer", "logits", "llguidance"])
async def test_nodes_that_cannot_compile(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, limits = BYTES, LIMITS
    if problem == "llguidance":
        monkeypatch.delitem(sys.modules, "prfaas.engine.guided.compiler")
        monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = Grammars(
        None if problem == "tokenizer" else tokenizer,
        EngineLimits(1000, VOCAB_SIZE, 4, 4, has_logits=False) if problem == "logits" else limits,
    )
    assert await grammars.compiled(None) is None
    with pytest.raises(InputError, match=problem) as caught:
        await grammars.compiled(REGEX)
    assert caught.value.where == REGEX.field
