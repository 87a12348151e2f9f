"""Reads a request's body and tokenises its prompt, for the paths that generate and for those that
only check (`render`)."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

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
from prfaas.engine.api import Engine, EngineJob, Sampling, check_cuts, check_job
from prfaas.errors import InputError
from prfaas.node.errors import request_error
from prfaas.node.job_builder import TokenizedRequest
from prfaas.node.request_schema import (
    DEFAULT_MAX_TOKENS,
    GenerationRequest,
    check_values,
    parse_chat,
    parse_completion,
)
from prfaas.node.responses import CHAT, TEXT, ResponseBuilder, ResponseShape
from prfaas.service.request_body import BodyLimits
from prfaas.text import AnswerText, Chat, ModelTokenizer

MAX_BODY_BYTES = 64 << 20  # a million token ids take about 8 MB as JSON
MAX_BODIES_BYTES = 512 << 20  # of bodies that are being read or parsed
BODY_S = 60.0  # for a body to arrive
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class NodeModel:
    """The model that a node serves."""

    name: str
    tokenizer: ModelTokenizer | None  # None: the node takes token ids only
    kvd_url: str | None = None  # of this node's kvd, for gateways
    events: str | None = None  # endpoints of published and of replayed KV events
    replay: str | None = None

    def require_tokenizer(self) -> ModelTokenizer:
        if self.tokenizer is None:
            raise InputError(
                "this node has no tokenizer", where="prompt", fix="send a list of token ids"
            )
        return self.tokenizer


class ReadRequest(NamedTuple):
    """A request whose body was read and whose prompt was tokenised."""

    asked: GenerationRequest
    shape: ResponseShape
    prompt: Sequence[int]
    sampling: Sampling

    def tokenized(self) -> TokenizedRequest:
        return TokenizedRequest(
            id=f"{self.shape.id_prefix}-{secrets.token_hex(12)}",
            prompt=self.prompt,
            sampling=self.sampling,
            salt=self.asked.cache_salt,
            transfer=self._transfer(),
        )

    def _transfer(self) -> RequestedTransfer | Reference | Remainder | None:
        params = self.asked.kv_transfer_params
        remainder = decode_remainder(params)
        if remainder is not None:
            return remainder
        reference = decode_reference(params)
        if reference is None:
            return decode(params, len(self.prompt))
        check_cuts(reference.cut_tokens, len(self.prompt), "kv_transfer_params.cut_tokens")
        return reference


class RequestReader:
    def __init__(self, model: NodeModel, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self._bodies = BodyLimits(
            each_bytes=MAX_BODY_BYTES, all_bytes=MAX_BODIES_BYTES, within_s=BODY_S
        )

    async def parsed(self, request: web.Request, parse: Callable[[bytes], T]) -> T:
        """Reads a body within the limits. Raises `RequestError` and what `parse` raises."""
        async with self._bodies.read(request) as body:
            check_values(body, self._engine.limits.max_tokens)
            return parse(body)

    async def read_completion(self, request: web.Request) -> ReadRequest:
        parsed = await self.parsed(request, parse_completion)
        asked = parsed.asked
        self._check_model(asked)
        prompt: Sequence[int]
        if isinstance(parsed.prompt, str):
            prompt = await asyncio.to_thread(
                self._model.require_tokenizer().encode,
                parsed.prompt,
                add_special_tokens=asked.add_special_tokens,
            )
        else:
            prompt = parsed.prompt
        default_tokens = min(DEFAULT_MAX_TOKENS, self._rest_tokens(prompt))
        return ReadRequest(asked, TEXT, prompt, asked.sampling(default_tokens))

    async def read_chat(self, request: web.Request) -> ReadRequest:
        parsed = await self.parsed(request, parse_chat)
        asked = parsed.asked
        self._check_model(asked)
        prompt = await self.encode_chat(parsed.chat)
        return ReadRequest(asked, CHAT, prompt, asked.sampling(self._rest_tokens(prompt)))

    async def encode_chat(self, chat: Chat) -> list[int]:
        tokenizer = self._model.require_tokenizer()
        try:
            return await asyncio.to_thread(tokenizer.encode_chat, chat)
        except RecursionError:
            raise InputError("the messages are nested too deeply", where="messages") from None

    def render(self, read: ReadRequest) -> dict[str, Any]:
        """The request as the engine would get it, as from vLLM's path of this name. Computes
        nothing: a gateway learns here whether the request would be refused."""
        tokenized = read.tokenized()
        self.response_builder(read, tokenized)
        check_job(
            EngineJob(tokenized.id, read.prompt, read.sampling),
            self._engine.spec,
            self._engine.limits,
        )
        sampling = {
            "max_tokens": read.sampling.max_tokens,
            "temperature": read.sampling.temperature,
            "top_p": read.sampling.top_p,
            "seed": read.sampling.seed,
            "stop": list(read.asked.stops),
            "stop_token_ids": sorted(read.sampling.stop_token_ids),
            "ignore_eos": read.sampling.ignore_eos,
        }
        return {
            "request_id": tokenized.id,
            "token_ids": list(read.prompt),
            "sampling_params": sampling,
            "model": self._model.name,
            "stream": read.asked.stream,
            "cache_salt": read.asked.cache_salt or None,
        }

    def response_builder(self, read: ReadRequest, tokenized: TokenizedRequest) -> ResponseBuilder:
        """Raises InputError when the answer cannot be made as requested."""
        asked = read.asked
        tokenizer = self._model.tokenizer if asked.detokenize else None
        if asked.stops and tokenizer is None:
            raise InputError(
                "stop strings need detokenised text", where="stop", fix="use stop_token_ids"
            )
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
            answer=AnswerText(tokenizer.decode if tokenizer is not None else None, asked.stops),
            transfer=handed_off,
            report_cuts=isinstance(transfer, Reference)
            or (isinstance(transfer, RemoteDecode | RemotePrefill) and transfer.report_cuts),
        )

    def _rest_tokens(self, prompt: Sequence[int]) -> int:
        """The default of max_tokens, as in vLLM: the rest of the model's context."""
        return max(1, self._engine.limits.max_tokens - len(prompt))

    def _check_model(self, asked: GenerationRequest) -> None:
        if asked.model is not None and asked.model != self._model.name:
            raise request_error(
                "model_not_found",
                f"this node serves {self._model.name!r}, not {asked.model[:100]!r}",
                param="model",
            )
