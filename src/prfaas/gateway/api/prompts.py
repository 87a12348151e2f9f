"""From a request's body to its token ids: parsed and tokenised once, in a thread if it is long."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from prfaas.errors import InputError, RequestError
from prfaas.gateway.api.request_schema import ParsedRequest, Parser, check_values
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.text import Chat, ModelTokenizer

# Rendering and tokenising this much takes well under a millisecond: less than a thread switch.
INLINE_BYTES = 1024
# Parsing a body of this size (some ten thousand token ids) takes about a millisecond. A longer body
# would stop every stream for its whole parse; in a thread, the interpreter switches in between.
INLINE_BODY_BYTES = 1 << 16
THREADS = 2  # the tokenizer releases the interpreter lock


class Prompts:
    def __init__(
        self, tokenizer: ModelTokenizer | None, max_tokens: int, threads: ThreadPoolExecutor
    ) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._threads = threads

    async def parse(self, parser: Parser, body: bytes) -> ParsedRequest:
        if len(body) <= INLINE_BODY_BYTES:
            return parser(body)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._parse_long, parser, body)

    def _parse_long(self, parser: Parser, body: bytes) -> ParsedRequest:
        check_values(body, self._max_tokens)
        return parser(body)

    async def token_ids(self, parsed: ParsedRequest, body_bytes: int) -> TokenIds:
        """`body_bytes` is the size of the body. Raises `RequestError` when the prompt and its
        answer exceed the model's context length."""
        ids = await self._tokenise(parsed, body_bytes)
        self._check_length(len(ids), parsed.options.limit_tokens)
        return ids

    async def _tokenise(self, parsed: ParsedRequest, body_bytes: int) -> TokenIds:
        prompt = parsed.prompt
        if isinstance(prompt, TokenIds):
            return prompt
        if self._tokenizer is None:
            raise InputError(
                "this gateway has no tokenizer",
                where="messages" if isinstance(prompt, Chat) else "prompt",
                fix="send token ids to /v1/completions",
            )
        work = partial(self._encode, self._tokenizer, prompt, parsed.add_special_tokens)
        if body_bytes <= INLINE_BYTES:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(
        self, tokenizer: ModelTokenizer, prompt: str | Chat, add_special_tokens: bool
    ) -> TokenIds:
        if isinstance(prompt, Chat):
            text, add_special_tokens = tokenizer.render(prompt), prompt.add_special_tokens
        else:
            text = prompt
        # A text that cannot fit is not tokenised: that could take minutes.
        minimum = -(-len(text) // tokenizer.longest_token)
        if minimum > self._max_tokens:
            raise self._too_long(f"at least {minimum}", None)
        return TokenIds.of(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _check_length(self, prompt_tokens: int, limit_tokens: int | None) -> None:
        if prompt_tokens + (limit_tokens or 1) > self._max_tokens:
            raise self._too_long(str(prompt_tokens), limit_tokens)

    def _too_long(self, prompt_tokens: str, limit_tokens: int | None) -> RequestError:
        wanted = "" if limit_tokens is None else f", and {limit_tokens} tokens are to be generated"
        return RequestError(
            400,
            "context_length_exceeded",
            f"This model's maximum context length is {self._max_tokens} tokens. However, the "
            f"prompt has {prompt_tokens} tokens{wanted}.",
            param="max_tokens" if limit_tokens is not None else "prompt",
        )
