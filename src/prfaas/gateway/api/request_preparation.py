"""From a request's body to the request that the gateway routes: parsed, rendered, tokenised and
checked against the model's context length.

The gateway does this for short bodies and its body workers for long ones. It runs on one thread and
waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.errors import InputError, RequestError
from prfaas.gateway.api.request_schema import (
    Body,
    Kind,
    ParsedRequest,
    Path,
    check_values,
    no_such_model,
    parse,
)
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.text import Chat, ModelTokenizer, is_multimodal
from prfaas.text.tokenization import (
    DetokenizeAnswer,
    TokenizeAnswer,
    detokenize,
    parse_detokenize,
    parse_tokenize,
    tokenize,
)

# Counting the values of a shorter body takes longer than parsing them.
_COUNTED_FROM_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """What the gateway needs of a request's body. Its size does not depend on the number of values
    in the body: ids are an array, and the fields for the engine are bytes."""

    path: Path
    prompts: tuple[TokenIds, ...]
    fields: Mapping[str, Any]  # as sent to the decode engine
    cache_salt: str
    stream: bool
    shows_usage: bool
    conversation: bool
    prompt_logprobs: bool
    multimodal: bool
    n: int = 1  # choices for each prompt
    nbytes: int = 0  # of memory that it holds; 0: not more than its body


class RequestPreparer:
    """Safe to use from several threads at once."""

    def __init__(self, model: str, max_tokens: int, tokenizer: ModelTokenizer | None) -> None:
        self._model = model
        self._max_tokens = max_tokens  # of prompt and answer together
        self._tokenizer = tokenizer

    def prepare(self, kind: Kind, body: Body) -> PreparedRequest:
        """Raises `InputError` and `RequestError`, as the two steps do."""
        return self.tokenise(self.parse(kind, body))

    def parse(self, kind: Kind, body: Body) -> ParsedRequest:
        """Raises `InputError`, which names the field, and `RequestError` for another model."""
        if len(body) > _COUNTED_FROM_BYTES:
            check_values(body, self._max_tokens)
        return parse(kind, body, self._model)

    def tokenise(self, parsed: ParsedRequest) -> PreparedRequest:
        """Raises `RequestError` when the prompt and its answer exceed the context length, and
        `InputError` when the prompt cannot be rendered."""
        options = parsed.options
        prompts = []
        for prompt in parsed.prompts:
            ids = self._token_ids(prompt, parsed.add_special_tokens)
            self._check_length(len(ids), options.limit_tokens)
            prompts.append(ids)
        chats = [prompt for prompt in parsed.prompts if isinstance(prompt, Chat)]
        return PreparedRequest(
            path=parsed.path,
            prompts=tuple(prompts),
            fields=parsed.fields,
            cache_salt=options.cache_salt or "",
            stream=bool(options.stream),
            shows_usage=options.shows_usage,
            conversation=bool(chats),
            prompt_logprobs=parsed.prompt_logprobs,
            multimodal=any(is_multimodal(chat.messages) for chat in chats),
            n=options.n or 1,
        )

    def tokenize(self, body: bytes) -> TokenizeAnswer:
        """The answer of /tokenize. Raises `InputError` and `RequestError`."""
        check_values(body, self._max_tokens)
        asked = parse_tokenize(body)
        self._check_model(asked.model)
        return tokenize(self._tokenizer, asked, self._max_tokens)

    def detokenize(self, body: bytes) -> DetokenizeAnswer:
        """The answer of /detokenize. Raises `InputError` and `RequestError`."""
        check_values(body, self._max_tokens)
        asked = parse_detokenize(body)
        self._check_model(asked.model)
        return detokenize(self._tokenizer, asked)

    def _check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self._model:
            raise no_such_model(asked, self._model)

    def _token_ids(self, prompt: str | TokenIds | Chat, add_special_tokens: bool) -> TokenIds:
        if isinstance(prompt, TokenIds):
            return prompt
        field = "messages" if isinstance(prompt, Chat) else "prompt"
        if self._tokenizer is None:
            raise InputError(
                "this gateway has no tokenizer",
                where=field,
                fix="send token ids to /v1/completions",
            )
        try:
            if isinstance(prompt, Chat):
                text = self._tokenizer.render(prompt)
                add_special_tokens = prompt.add_special_tokens
            else:
                text = prompt
        except RecursionError:
            raise InputError("nested too deeply", where=field) from None
        # A text that cannot fit is not tokenised: that could take minutes.
        minimum = -(-len(text) // self._tokenizer.longest_token)
        if minimum > self._max_tokens:
            raise self._too_long(f"at least {minimum}", None)
        return TokenIds.of(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

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
