"""Reads a request's body and tokenises its prompt, for the paths that generate and for those that
only check (`render`)."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
from aiohttp import web

from prfaas.contracts.kv_transfer_params import (
    Reference,
    Remainder,
    RemoteDecode,
    RemotePrefill,
    RequestedTransfer,
    ResponseParams,
    decode,
    decode_reference,
    decode_remainder,
    encode,
)
from prfaas.contracts.openai import TENANT_HEADER
from prfaas.engine.api import (
    MAX_PROMPT_LOGPROBS,
    Engine,
    EngineJob,
    PromptLogprobs,
    Sampling,
    check_cuts,
    check_job,
)
from prfaas.engine.guided import GrammarDescription
from prfaas.errors import InputError
from prfaas.node.choices import continuation_sampling
from prfaas.node.errors import request_error
from prfaas.node.job_builder import TokenizedRequest
from prfaas.node.logprobs import LogprobsReader, TokenEntry, prompt_logprobs, token_id_text
from prfaas.node.request_schema import (
    DEFAULT_MAX_TOKENS,
    MAX_LISTED_TOKENS,
    ChatCompletion,
    ChatOptions,
    Completion,
    GenerationRequest,
    check_values,
    parse_chat,
    parse_completion,
)
from prfaas.node.responses import CHAT, TEXT, ResponseBuilder, ResponseShape
from prfaas.node.structured.fields import describe_grammar
from prfaas.node.structured.grammars import Grammars
from prfaas.node.structured.tool_calls import ToolCallReader
from prfaas.node.structured.tool_choice import ToolUse, plan_tool_use
from prfaas.service.request_body import BodyLimits
from prfaas.text import AnswerText, Chat, ModelTokenizer
from prfaas.types import MAX_TAG_CHARACTERS

MAX_BODY_BYTES = 64 << 20  # a million token ids take about 8 MB as JSON
MAX_BODIES_BYTES = 512 << 20  # of bodies that are being read or parsed
BODY_S = 60.0  # for a body to arrive
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeModel:
    """The model that a node serves."""

    name: str
    tokenizer: ModelTokenizer | None  # None: the node takes token ids only
    kvd_url: str | None = None  # of this node's kvd

    def require_tokenizer(self) -> ModelTokenizer:
        if self.tokenizer is None:
            raise InputError(
                "this node has no tokenizer", where="prompt", fix="send a list of token ids"
            )
        return self.tokenizer


class ReadRequest(NamedTuple):
    """A request whose body was read and whose prompt was tokenised; or one of its prompts."""

    asked: GenerationRequest
    shape: ResponseShape
    prompt: Sequence[int]
    sampling: Sampling
    echo: str = ""  # text before the answer
    tool_use: ToolUse | None = None  # None: calls are not read
    tenant: str = ""  # the gateway's tag of it

    def tokenized(self, id: str, continuation: int = 0) -> TokenizedRequest:
        return TokenizedRequest(
            id=id,
            prompt=self.prompt,
            sampling=continuation_sampling(self.sampling, continuation),
            salt=self.asked.cache_salt,
            transfer=self._transfer(),
            continuation=continuation,
            # Once for all continuations.
            prompt_logprobs=None if continuation else self.asked.prompt_logprobs_count,
            tenant=self.tenant,
        )

    def new_id(self) -> str:
        return f"{self.shape.id_prefix}-{secrets.token_hex(12)}"

    def _transfer(self) -> RequestedTransfer | Reference | Remainder | None:
        params = self.asked.kv_transfer_params
        remainder = decode_remainder(params)
        if remainder is not None:
            return remainder
        reference = decode_reference(params)
        if reference is None:
            transfer = decode(params, len(self.prompt))
            if isinstance(transfer, RemotePrefill):
                # Each continuation attaches it, whatever the caller has declared.
                return msgspec.structs.replace(transfer, attachments=self.asked.continuations)
            return transfer
        check_cuts(reference.cut_tokens, len(self.prompt), "kv_transfer_params.cut_tokens")
        return reference


class PlannedChoice(NamedTuple):
    """One choice of a response: what is run, and what makes its part of the response."""

    read: ReadRequest
    request: TokenizedRequest
    builder: ResponseBuilder


class ShownPrompt(NamedTuple):
    """Log-probabilities of a prompt, as responses have them."""

    listed: list[dict[str, Any] | None]
    entries: Sequence[TokenEntry]  # with `echo` and `logprobs`


class RequestReader:
    def __init__(self, model: NodeModel, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._bodies = BodyLimits(
            each_bytes=MAX_BODY_BYTES, all_bytes=MAX_BODIES_BYTES, within_s=BODY_S
        )
        self._grammars = Grammars(model.tokenizer, engine.limits)

    async def start(self) -> None:
        """Before the first request, which would wait longer otherwise."""
        await self._grammars.start()

    async def close(self) -> None:
        await self._grammars.close()

    async def parsed(
        self, request: web.Request, parse: Callable[[bytes], T], listed_tokens: int = 0
    ) -> T:
        """Reads a body within the limits. Raises `RequestError` and what `parse` raises."""
        async with self._bodies.read(request) as body:
            check_values(body, self._engine.limits.max_tokens, listed_tokens)
            return parse(body)

    async def read_completion(self, request: web.Request) -> list[ReadRequest]:
        """One for each prompt."""
        parsed = await self.parsed(request, parse_completion, MAX_LISTED_TOKENS)
        asked = parsed.asked
        self.check_model(asked.model)
        bad_words = await self._bad_words(asked)
        grammar = await self._grammars.compiled(
            describe_grammar(asked.response_format, asked.structured_outputs), _tenant(request)
        )
        reads: list[ReadRequest] = []
        for given in parsed.prompts:
            prompt: Sequence[int]
            if isinstance(given, str):
                prompt = await asyncio.to_thread(
                    self._model.require_tokenizer().encode,
                    given,
                    add_special_tokens=asked.add_special_tokens,
                )
            else:
                prompt = given
            default_tokens = min(DEFAULT_MAX_TOKENS, self._rest_tokens(prompt))
            sampling = asked.sampling(default_tokens, bad_words, grammar)
            echo = await self._echo(asked, given) if asked.echo else ""
            reads.append(ReadRequest(asked, TEXT, prompt, sampling, echo, tenant=_tenant(request)))
        self._check_all(reads)
        return reads

    async def read_chat(self, request: web.Request) -> ReadRequest:
        parsed = await self.parsed(request, parse_chat)
        asked = parsed.asked
        self.check_model(asked.model)
        tool_use = self._tool_use(parsed)
        tenant = _tenant(request)
        grammar = await self._grammars.compiled(self._chat_grammar(asked, tool_use), tenant)
        prompt = await self.encode_chat(parsed.chat)
        sampling = asked.sampling(self._rest_tokens(prompt), await self._bad_words(asked), grammar)
        read = ReadRequest(asked, CHAT, prompt, sampling, tool_use=tool_use, tenant=tenant)
        self._check_all([read])
        return read

    def _check_all(self, reads: Sequence[ReadRequest]) -> None:
        """Before anything is computed. Of a single prompt, the engine checks the rest."""
        alternatives = reads[0].asked.prompt_logprobs_count
        if alternatives is not None:
            tokens = sum(len(read.prompt) for read in reads) * reads[0].asked.continuations
            if tokens * (alternatives + 1) > MAX_PROMPT_LOGPROBS:
                raise InputError(
                    f"{tokens} tokens of all choices' prompts with {alternatives} alternatives are "
                    f"more than {MAX_PROMPT_LOGPROBS} log-probabilities",
                    where="prompt_logprobs",
                    fix="send fewer or shorter prompts, or ask for fewer alternatives",
                )
        if len(reads) > 1:
            for read in reads:
                self._check_job(read)

    def _check_job(self, read: ReadRequest) -> None:
        """Raises InputError when the engine could not run the request."""
        job = EngineJob(
            "", read.prompt, read.sampling, prompt_logprobs=read.asked.prompt_logprobs_count
        )
        check_job(job, self._engine.spec, self._engine.limits)

    def _tool_use(self, parsed: ChatCompletion) -> ToolUse | None:
        asked = parsed.asked
        return plan_tool_use(
            parsed.chat.tools,
            asked.tool_choice,
            asked.parallel_tool_calls,
            lambda: self._text_tokenizer(asked, "tools").tool_form,
        )

    def _chat_grammar(self, asked: ChatOptions, use: ToolUse | None) -> GrammarDescription | None:
        described = describe_grammar(asked.response_format, asked.structured_outputs)
        if use is None or (described is not None and not use.is_forced):
            return described
        if described is not None:
            raise InputError(
                f"{described.field} has a grammar already",
                where="tool_choice",
                fix='send "auto" or "none", or leave the other field out',
            )
        return use.grammar(self._text_tokenizer(asked, "tools").special_token_id)

    async def encode_chat(self, chat: Chat) -> list[int]:
        tokenizer = self._model.require_tokenizer()
        try:
            return await asyncio.to_thread(tokenizer.encode_chat, chat)
        except RecursionError:
            raise InputError("the messages are nested too deeply", where="messages") from None

    async def _bad_words(self, asked: GenerationRequest) -> list[list[int]]:
        if not asked.bad_words:
            return []
        words = tuple(dict.fromkeys(asked.bad_words))
        encode_word = self._text_tokenizer(asked, "bad_words").encode_bad_word
        found = await asyncio.to_thread(lambda: [encode_word(word) for word in words])
        if not all(found):
            raise InputError(
                "a word has no tokens", where="bad_words", fix="leave out words of spaces"
            )
        return [ids for sequences in found for ids in sequences]

    async def _echo(self, asked: GenerationRequest, prompt: str | array[int]) -> str:
        tokenizer = self._text_tokenizer(asked, "echo")
        if isinstance(prompt, str):
            return prompt
        if len(prompt) > self._engine.limits.max_tokens:
            return ""  # the request is refused for its length
        return await asyncio.to_thread(tokenizer.decode_all, prompt)

    def _text_tokenizer(self, asked: GenerationRequest, where: str) -> ModelTokenizer:
        """For a field that needs the text of tokens."""
        if self._model.tokenizer is None or not asked.detokenize:
            raise InputError(
                "the field needs a node with a tokenizer, and detokenize",
                where=where,
                fix="leave it out",
            )
        return self._model.tokenizer

    def render(self, read: ReadRequest) -> dict[str, Any]:
        """The request as the engine would get it, as from vLLM's path of this name. Computes
        nothing: a gateway learns here whether the request would be refused."""
        tokenized = read.tokenized(read.new_id())
        self.response_builder(read, tokenized)
        self._check_job(read)
        sampling = {
            **dataclasses.asdict(dataclasses.replace(read.sampling, grammar=None)),
            "response_format": read.asked.response_format,
            "structured_outputs": read.asked.structured_outputs,
            "n": read.asked.continuations,
            "prompt_logprobs": read.asked.prompt_logprobs_count,
            "stop": list(read.asked.stops),
            "bad_words": read.asked.bad_words or [],
            "include_stop_str_in_output": read.asked.include_stop_str_in_output,
            "skip_special_tokens": read.asked.skip_special_tokens,
        }
        return {
            "request_id": tokenized.id,
            "token_ids": list(read.prompt),
            "sampling_params": sampling,
            "model": self._model.name,
            "stream": read.asked.stream,
            "cache_salt": read.asked.cache_salt or None,
        }

    def choices(self, reads: Sequence[ReadRequest]) -> list[PlannedChoice]:
        """Those of all prompts, each with all its continuations. Raises InputError when an answer
        cannot be made as requested."""
        id, continuations = reads[0].new_id(), reads[0].asked.continuations
        planned: list[PlannedChoice] = []
        for read in reads:
            for continuation in range(continuations):
                index = len(planned)
                own_id = id if len(reads) * continuations == 1 else f"{id}-{index}"
                request = read.tokenized(own_id, continuation)
                builder = self.response_builder(read, request)
                builder.id, builder.index = id, index
                builder.counts_prompt = continuation == 0
                planned.append(PlannedChoice(read, request, builder))
        return planned

    def shown_prompt(self, read: ReadRequest, found: PromptLogprobs) -> ShownPrompt:
        """Takes time for a long prompt: call it in a thread."""
        tokenizer = self._model.tokenizer if read.asked.detokenize else None
        text_of = tokenizer.token_text if tokenizer is not None else None
        echo = isinstance(read.asked, Completion) and read.asked.echo
        reader = self._logprobs(read.asked) if echo else None
        entries = reader.prompt_entries(read.prompt, found) if reader is not None else ()
        return ShownPrompt(prompt_logprobs(read.prompt, found, text_of), entries)

    def response_builder(self, read: ReadRequest, tokenized: TokenizedRequest) -> ResponseBuilder:
        """Raises InputError when the answer cannot be made as requested."""
        asked = read.asked
        tokenizer = self._model.tokenizer if asked.detokenize else None
        if asked.stops and tokenizer is None:
            raise InputError(
                "stop strings need detokenised text", where="stop", fix="use stop_token_ids"
            )
        decode = None
        if tokenizer is not None:
            # The marks of tool calls may be special tokens. vLLM shows them all, too.
            skips = asked.skip_special_tokens and read.tool_use is None
            decode = tokenizer.decode if skips else tokenizer.decode_all
        transfer, handed_off = tokenized.transfer, None
        if isinstance(transfer, RemoteDecode):
            handed_off = encode(
                ResponseParams(
                    transfer_id=transfer.grant.transfer_id, handoff_tokens=transfer.handoff_tokens
                )
            )
        return ResponseBuilder(
            shape=read.shape,
            id=tokenized.id,
            model=self._model.name,
            created_s=int(time.time()),
            prompt_tokens=len(tokenized.prompt),
            return_token_ids=asked.return_token_ids,
            answer=AnswerText(
                decode,
                asked.stops,
                include_stop=asked.include_stop_str_in_output,
                min_tokens=asked.min_tokens,
            ),
            sampling=read.sampling,
            include_stop=asked.include_stop_str_in_output,
            logprobs=self._logprobs(asked),
            echo=read.echo,
            continuous_usage=asked.continuous_usage,
            transfer=handed_off,
            report_cuts=isinstance(transfer, Reference)
            or (isinstance(transfer, RemoteDecode | RemotePrefill) and transfer.report_cuts),
            calls=ToolCallReader(read.tool_use) if read.tool_use is not None else None,
        )

    def _logprobs(self, asked: GenerationRequest) -> LogprobsReader | None:
        count = asked.logprobs_count
        if count is None:
            return None
        if asked.return_tokens_as_token_ids:
            return LogprobsReader(token_id_text, count)
        return LogprobsReader(self._text_tokenizer(asked, "logprobs").token_text, count)

    def _rest_tokens(self, prompt: Sequence[int]) -> int:
        """The default of max_tokens, as in vLLM: the rest of the model's context."""
        return max(1, self._engine.limits.max_tokens - len(prompt))

    def check_model(self, asked: str | None) -> None:
        if asked is not None and asked != self._model.name:
            raise request_error(
                "model_not_found",
                f"this node serves {self._model.name!r}, not {asked[:100]!r}",
                param="model",
            )


def _tenant(request: web.Request) -> str:
    """The gateway's tag of the tenant. Requests without one are those of one tenant."""
    return request.headers.get(TENANT_HEADER, "")[:MAX_TAG_CHARACTERS]
