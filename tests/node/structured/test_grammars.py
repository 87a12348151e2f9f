"""Compiling is bounded: grammars that wait, the time of one, and nodes that cannot compile."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prfaas.engine.api import EngineLimits
from prfaas.engine.checkpoint.tokenizer import EOS, VOCAB_SIZE, token_id
from prfaas.engine.guided import GrammarDescription, compiler
from prfaas.engine.guided.compiler import CompiledGrammar, GrammarCompiler
from prfaas.errors import InputError, RequestError
from prfaas.node.structured import grammars as structured
from prfaas.node.structured.grammars import AT_ONCE, MAX_WAITING_EACH, Grammars
from prfaas.types import NotNow
from tests.engine.guided.test_compiler import ENDLESS, with_limits
from tests.node.local_api import BYTES
from tests.waiting import HANG_S

LIMITS = EngineLimits(1000, VOCAB_SIZE, 4, 4, eos_token_ids=frozenset({token_id(EOS)}))
REGEX = GrammarDescription("regex", "a", "structured_outputs.regex")


class Paused:
    """Compiling waits until the test lets it continue."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go_on = threading.Event()
        self.begun: list[GrammarDescription] = []
        compile_now = GrammarCompiler.compile

        def paused(
            compiler: GrammarCompiler, given: GrammarDescription
        ) -> CompiledGrammar | NotNow:
            self.begun.append(given)
            assert self.go_on.wait(HANG_S)
            return compile_now(compiler, given)

        monkeypatch.setattr(GrammarCompiler, "compile", paused)


@asynccontextmanager
async def grammars_of(limits: EngineLimits = LIMITS) -> AsyncIterator[Grammars]:
    grammars = Grammars(BYTES, limits)
    try:
        yield grammars
    finally:
        await grammars.close()


async def test_the_number_of_waiting_grammars_of_a_tenant_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused = Paused(monkeypatch)
    async with grammars_of() as grammars, asyncio.timeout(HANG_S):
        most = MAX_WAITING_EACH + AT_ONCE // 2
        waiting = [asyncio.ensure_future(grammars.compiled(REGEX, "a")) for _ in range(most)]
        await asyncio.sleep(0)  # all of them start
        try:
            with pytest.raises(RequestError) as caught:
                await grammars.compiled(REGEX, "a")
            assert (caught.value.status, caught.value.code) == (503, "overloaded")
            other = asyncio.ensure_future(grammars.compiled(REGEX, "b"))
            await asyncio.sleep(0)
            assert not other.done()
        finally:
            paused.go_on.set()
        made = await asyncio.gather(*waiting, other)
        assert all(grammar is not None and grammar.field == REGEX.field for grammar in made)
        assert await grammars.compiled(REGEX) is not None


async def test_a_client_that_leaves_keeps_its_turn_until_the_work_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paused = Paused(monkeypatch)
    async with grammars_of() as grammars, asyncio.timeout(HANG_S):
        first = [asyncio.ensure_future(grammars.compiled(REGEX, "a")) for _ in range(4)]
        await asyncio.sleep(0)
        for request in first:
            request.cancel()
        await asyncio.gather(*first, return_exceptions=True)
        last = asyncio.ensure_future(grammars.compiled(REGEX, "a"))
        await asyncio.sleep(0)
        paused.go_on.set()
        assert await last is not None
        assert len(paused.begun) == 3  # two had begun, and two were waiting


async def test_the_time_of_compiling_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the machine has no processor for it. The connection of a grammar that is late is
    not used again."""
    monkeypatch.setattr(compiler, "COMPILE_S", 0.01)
    async with grammars_of() as grammars:
        await grammars.start()
        endless = GrammarDescription("grammar", ENDLESS, "structured_outputs.grammar")
        with pytest.raises(InputError, match="longer than") as caught:
            await grammars.compiled(endless)
        assert caught.value.where == endless.field


async def test_a_choice_beside_an_endless_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The machine may have little time for processes that give way to others.
    monkeypatch.setattr(compiler, "COMPILE_S", HANG_S)
    monkeypatch.setattr(structured, "WAIT_S", HANG_S)
    with_limits(monkeypatch, COMPILE_CPU_S=1.0)
    async with grammars_of() as grammars:
        await grammars.start()
        endless = [
            asyncio.ensure_future(
                grammars.compiled(
                    GrammarDescription("grammar", ENDLESS.replace("50", f"5{number}"), "field"),
                    "attacker",
                )
            )
            for number in range(3)
        ]
        await asyncio.sleep(0)
        choice = GrammarDescription("choice", '["a"]', "field")
        assert await grammars.compiled(choice, "victim") is not None
        assert not any(work.done() for work in endless)
        for work in endless:
            with pytest.raises(InputError, match="too complex"):
                await work


@pytest.mark.parametrize("problem", ["tokenizer", "logits", "llguidance"])
async def test_nodes_that_cannot_compile(problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, limits = BYTES, LIMITS
    if problem == "llguidance":
        monkeypatch.setitem(sys.modules, "llguidance", None)
    grammars = Grammars(
        None if problem == "tokenizer" else tokenizer,
        EngineLimits(1000, VOCAB_SIZE, 4, 4, has_logits=False) if problem == "logits" else limits,
    )
    assert await grammars.compiled(None) is None
    with pytest.raises(InputError, match=problem) as caught:
        await grammars.compiled(REGEX)
    assert caught.value.where == REGEX.field
    await grammars.close()
