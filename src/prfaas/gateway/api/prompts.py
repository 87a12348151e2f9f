"""From a request's body to its token ids: once, and off the event loop where it takes long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from prfaas.errors import InputError, RequestError
from prfaas.gateway.api.request_schema import Reading
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.text import Chat, ModelTokenizer

# Rendering and tokenising so little takes well under a millisecond: less than a thread's turn.
INLINE_BYTES = 1024
# A body of so much (some ten thousand token ids) is parsed in about a millisecond. Longer ones
# would stop every stream for as long; in a thread the interpreter takes turns.
INLINE_BODY_BYTES = 1 << 16
THREADS = 2  # the tokenizer lets others run meanwhile


class Prompts:
    def __init__(
        self, tokenizer: ModelTokenizer | None, max_tokens: int, threads: ThreadPoolExecutor
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._threads = threads

    async def read(self, how: Callable[[bytes], Reading], body: bytes) -> Reading:
        if len(body) <= INLINE_BODY_BYTES:
            return how(body)
        return await asyncio.get_running_loop().run_in_executor(self._threads, how, body)

    async def ids(self, reading: Reading, nbytes: int) -> TokenIds:
        """`nbytes`: of the body. Raises `RequestError` when it does not fit into the model."""
        ids = await self._ids(reading, nbytes)
        self._check_length(len(ids), reading.options.limit_tokens)
        return ids

    async def _ids(self, reading: Reading, nbytes: int) -> TokenIds:
        prompt = reading.prompt
        if isinstance(prompt, TokenIds):
            return prompt
        if self._tokenizer is None:
            raise InputError(
                "this gateway has no tokenizer",
                where="messages" if isinstance(prompt, Chat) else "prompt",
                fix="send token ids to /v1/completions",
            )
        work = partial(self._encode, self._tokenizer, prompt, reading.add_special_tokens)
        if nbytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(
        self, tokenizer: ModelTokenizer, prompt: str | Chat, add_special_tokens: bool
    ) -> TokenIds:
        if isinstance(prompt, Chat):
            text, add_special_tokens = tokenizer.render(prompt), prompt.add_special_tokens
        else:
            text = prompt
        # What cannot fit is not tokenised to find out: that could take minutes.
        least = -(-len(text) // tokenizer.longest_token)
        if least > self._max_tokens:
            raise self._too_long(f"at least {least}", None)
        return TokenIds.of(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _check_length(self, prompt_tokens: int, limit_tokens: int | None) -> None:
        if prompt_tokens + (limit_tokens or 1) > self._max_tokens:
            raise self._too_long(str(prompt_tokens), limit_tokens)

    def _too_long(self, prompt_tokens: str, limit_tokens: int | None) -> RequestError:
        wanted = "" if limit_tokens is None else f", and {limit_tokens} are to be generated"
        return RequestError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {self._max_tokens} tokens. However, the "
            f"prompt has {prompt_tokens} tokens{wanted}.",
            param="max_tokens" if limit_tokens is not None else "prompt",
        )
