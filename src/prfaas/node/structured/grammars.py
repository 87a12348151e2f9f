"""Compiles the grammars of requests, off the event loop and off the engine's thread."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from prfaas.engine.api import EngineLimits, Grammar
from prfaas.engine.guided import GrammarDescription
from prfaas.errors import InputError
from prfaas.node.errors import request_error
from prfaas.text import ModelTokenizer

if TYPE_CHECKING:
    from prfaas.engine.guided.compiler import GrammarCompiler

# Threads of their own: tokenising other requests must not wait for a large schema.
THREADS = 2
MAX_WAITING = 32
COMPILE_S = 30.0
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
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="prfaas-grammar")
        self._waiting = 0

    async def compiled(self, description: GrammarDescription | None) -> Grammar | None:
        """InputError when the grammar cannot be used; RequestError when too many are waiting."""
        if description is None:
            return None
        if self._compiler is None:
            raise InputError(self._problem, where=description.field, fix="leave it out")
        if self._waiting >= MAX_WAITING:
            raise request_error(
                "overloaded",
                f"{MAX_WAITING} grammars are waiting to be compiled",
                param=description.field,
                retry_after_s=RETRY_S,
            )
        self._waiting += 1
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(COMPILE_S):
                return await loop.run_in_executor(
                    self._threads, self._compiler.compile, description
                )
        except TimeoutError:
            raise InputError(
                f"compiling took longer than {COMPILE_S:.0f} s",
                where=description.field,
                fix="use a smaller schema, expression or grammar",
            ) from None
        finally:
            self._waiting -= 1


def _compiler(tokenizer: ModelTokenizer, limits: EngineLimits) -> GrammarCompiler:
    from prfaas.engine.guided.compiler import (
        GrammarCompiler,
    )  # nodes without a model do not need it

    return GrammarCompiler(
        tokenizer.to_json(), max(limits.vocab_size, tokenizer.vocab_size), limits.eos_token_ids
    )
