"""Compiles the grammars of requests, off the event loop and off the engine's thread."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from prfaas.engine.api import EngineLimits, Grammar
from prfaas.engine.guided import GrammarDescription
from prfaas.errors import EngineError, InputError, RequestError
from prfaas.node.errors import not_now, of_job, request_error
from prfaas.node.structured.turns import Turns
from prfaas.text import ModelTokenizer
from prfaas.types import NotNow

if TYPE_CHECKING:
    from prfaas.engine.guided.compiler import CompiledGrammar, GrammarCompiler

_LOG = logging.getLogger(__name__)
# Each thread waits for a process of a grammar. One tenant has half of them at most.
AT_ONCE = 4
MAX_WAITING, MAX_WAITING_EACH = 128, 32  # of all tenants, and of one
WAIT_S = 30.0  # for a turn
RETRY_S = 1.0


class Grammars:
    """Use it on one event loop."""

    def __init__(self, tokenizer: ModelTokenizer | None, limits: EngineLimits) -> None:
        self._compiler: GrammarCompiler | None = None
        self._problem = "a grammar needs a model's logits and a tokenizer, which this node lacks"
        if tokenizer is not None and limits.has_logits:
            try:
                self._compiler = _compiler(tokenizer, limits)
            except ModuleNotFoundError as error:  # of an installation without the `engine` extra
                self._problem = f"this node has no grammars, because {error.name} is not installed"
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="prfaas-grammar")
        self._turns = Turns(
            at_once=AT_ONCE,
            at_once_each=AT_ONCE // 2,
            waiting=MAX_WAITING,
            waiting_each=MAX_WAITING_EACH,
        )

    async def start(self) -> None:
        """Otherwise the first request with a grammar waits until the vocabulary is read. A problem
        is one of each such request."""
        if self._compiler is not None:
            try:
                await asyncio.to_thread(self._compiler.start)
            except (EngineError, InputError) as error:
                _LOG.warning("requests with a grammar will fail: %s", error)

    async def close(self) -> None:
        """Ends all processes of grammars."""
        if self._compiler is not None:
            await asyncio.to_thread(self._compiler.close)
        self._threads.shutdown(wait=False)

    async def compiled(
        self, description: GrammarDescription | None, tenant: str = ""
    ) -> Grammar | None:
        """InputError when the grammar cannot be used; RequestError when too many are waiting."""
        if description is None:
            return None
        if self._compiler is None:
            raise InputError(self._problem, where=description.field, fix="leave it out")
        known = self._compiler.known(description)
        if known is not None:
            return known
        if self._turns.is_full(tenant):
            raise _overloaded(description.field)
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turns.take(tenant)
        except TimeoutError:
            raise _overloaded(description.field) from None
        loop = asyncio.get_running_loop()
        work = loop.run_in_executor(self._threads, self._compiler.compile, description)
        work.add_done_callback(lambda work: self._leave(tenant, work))
        try:
            # The turn ends with the work, also when the client has left before.
            made = await asyncio.shield(work)
        except EngineError as error:
            raise of_job(error) from None
        if isinstance(made, NotNow):
            raise not_now(made)
        return made

    def _leave(self, tenant: str, work: asyncio.Future[CompiledGrammar | NotNow]) -> None:
        self._turns.leave(tenant)
        if not work.cancelled():
            work.exception()  # the client may have left


def _overloaded(field: str) -> RequestError:
    return request_error(
        "overloaded",
        "too many grammars are waiting to be compiled",
        param=field,
        retry_after_s=RETRY_S,
    )


def _compiler(tokenizer: ModelTokenizer, limits: EngineLimits) -> GrammarCompiler:
    from prfaas.engine.guided.compiler import (
        GrammarCompiler,
    )  # nodes without a model do not need it

    return GrammarCompiler(
        tokenizer.to_json(), max(limits.vocab_size, tokenizer.vocab_size), limits.eos_token_ids
    )
