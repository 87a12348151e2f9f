"""The messages between the gateway and a body worker, and the file that holds a prepared request.

A message is one packet of a Unix socket. A body and a prepared request are anonymous files, whose
descriptors travel with the message: neither side copies them through the socket.
"""

from __future__ import annotations

import mmap
import os
from typing import Any, TypeAlias

import msgspec
import numpy as np

from prfaas.errors import InputError, PrfaasError, RequestError
from prfaas.gateway.api.content_encoding import Encoding
from prfaas.gateway.api.request_preparation import PreparedRequest
from prfaas.gateway.api.request_schema import Kind, Path
from prfaas.gateway.client.request_body import JsonParts
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.http_client.paced_writer import Buffer

PACKET_BYTES = 1 << 16
_TEXT_CHARS = 2000  # of an error
_ID_BYTES = 4


class WorkerSettings(msgspec.Struct, frozen=True):
    """The first message to a worker."""

    model: str
    max_tokens: int
    body_bytes: int  # of one body, decompressed
    memory_bytes: int  # of the worker process
    job_s: float
    tokenizer_folder: str | None = None


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The worker's answer to its settings."""


class Job(msgspec.Struct, frozen=True):
    """Comes with the descriptor of the body."""

    kind: Kind
    encoding: Encoding = ""


class PackedPrompt(msgspec.Struct, frozen=True, array_like=True):
    ids: int
    marks: int
    json_bytes: int


class Prepared(msgspec.Struct, frozen=True, tag="prepared"):
    """Comes with the descriptor of a file: the ids and marks of each prompt, the JSON of each
    prompt, the long fields, and the head, in this order. The numbers are aligned."""

    prompts: list[PackedPrompt]
    long_fields: list[tuple[str, int]]  # name and bytes
    head_bytes: int
    read_bytes: int = 0  # of the body, decompressed
    cpu_s: float = 0.0  # that reading it has taken


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """An `InputError`, or a `RequestError` when it has a status."""

    problem: str
    where: str | None = None
    fix: str | None = None
    status: int = 0
    code: str = ""
    ends: bool = False  # the worker takes no further job
    read_bytes: int = 0  # of the body, decompressed, before it was refused
    cpu_s: float = 0.0

    @classmethod
    def of(cls, error: InputError | RequestError) -> Refused:
        if isinstance(error, RequestError):
            return cls(
                error.message[:_TEXT_CHARS], error.param, status=error.status, code=error.code
            )
        return cls(error.problem[:_TEXT_CHARS], error.where, error.fix)

    def request_error(self) -> RequestError:
        return RequestError(self.status, self.code, self.problem, param=self.where)

    def error(self) -> PrfaasError:
        if self.status:
            return self.request_error()
        return InputError(self.problem, where=self.where, fix=self.fix)


# The gateway then starts a new process, which has all of its memory.
OUT_OF_MEMORY = Refused(
    "the body takes too much memory to read; send a shorter request",
    status=400,
    code="body_too_complex",
    ends=True,
)
Reply: TypeAlias = Ready | Prepared | Refused
_REPLY = msgspec.json.Decoder(Reply)


class _Head(msgspec.Struct, frozen=True):
    """The rest of a `PreparedRequest`. The fields have at most 1 MiB together."""

    path: Path
    cache_salt: str
    stream: bool
    shows_usage: bool
    conversation: bool
    prompt_logprobs: bool
    multimodal: bool
    n: int
    fields: dict[str, msgspec.Raw]


_HEAD = msgspec.json.Decoder(_Head)


def read_reply(packet: bytes) -> Reply:
    """Raises `msgspec.MsgspecError`."""
    reply: Reply = _REPLY.decode(packet)
    return reply


def pack(prepared: PreparedRequest, file: int) -> Prepared:
    """Writes the request to the file."""
    prompts = [prompt.marked() for prompt in prepared.prompts]
    json = [bytes(prompt.json()) for prompt in prompts]
    long = {name: value for name, value in prepared.fields.items() if isinstance(value, JsonParts)}
    fields: dict[str, Any] = {
        name: msgspec.Raw(msgspec.json.encode(value))
        for name, value in prepared.fields.items()
        if name not in long
    }
    head = msgspec.json.encode(
        _Head(
            prepared.path,
            prepared.cache_salt,
            prepared.stream,
            prepared.shows_usage,
            prepared.conversation,
            prepared.prompt_logprobs,
            prepared.multimodal,
            prepared.n,
            fields,
        )
    )
    numbers = [part.tobytes() for prompt in prompts for part in (prompt.array, prompt.marks)]
    parts: list[Buffer] = [*numbers, *json]
    for value in long.values():
        parts += value.parts
    for part in [*parts, head]:
        _write(file, part)
    sizes = [(name, len(value)) for name, value in long.items()]
    packed = [
        PackedPrompt(len(prompt), len(prompt.marks), len(text))
        for prompt, text in zip(prompts, json, strict=True)
    ]
    return Prepared(packed, sizes, len(head))


def unpack(message: Prepared, file: int) -> PreparedRequest:
    """The request in the file, which stays where it is: this takes the same time for every size.
    Raises ValueError when the file does not have the size that the message says."""
    numbers = _ID_BYTES * sum(packed.ids + packed.marks for packed in message.prompts)
    json_bytes = sum(packed.json_bytes for packed in message.prompts)
    long_bytes = sum(nbytes for _, nbytes in message.long_fields)
    nbytes = numbers + json_bytes + long_bytes + message.head_bytes
    if os.fstat(file).st_size != nbytes:
        raise ValueError("the file has another size than the message says")
    view = memoryview(mmap.mmap(file, nbytes, prot=mmap.PROT_READ))
    integers = np.frombuffer(view[:numbers], dtype=np.uint32)
    prompts, number, at = [], 0, numbers
    for packed in message.prompts:
        ids = integers[number : (number := number + packed.ids)]
        marks = integers[number : (number := number + packed.marks)]
        json = view[at : (at := at + packed.json_bytes)]
        prompts.append(TokenIds(ids, json, marks))
    fields: dict[str, Any] = {}
    for name, size in message.long_fields:
        fields[name] = JsonParts(view[at : (at := at + size)])
    head = _HEAD.decode(bytes(view[at:]))
    return PreparedRequest(
        path=head.path,
        prompts=tuple(prompts),
        fields={**head.fields, **fields},
        cache_salt=head.cache_salt,
        stream=head.stream,
        shows_usage=head.shows_usage,
        conversation=head.conversation,
        prompt_logprobs=head.prompt_logprobs,
        multimodal=head.multimodal,
        n=head.n,
        nbytes=nbytes,
    )


def _write(file: int, data: Buffer) -> None:
    view = memoryview(data)
    while len(view):
        view = view[os.write(file, view) :]
