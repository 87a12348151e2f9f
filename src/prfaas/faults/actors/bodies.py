"""Request bodies that are made to hurt. Pure.

Each stays below the gateway's limit for one body (64 MB), so that only its content is the problem.
"""

from __future__ import annotations

import gzip
import json
import random

from prfaas.measure.prompts import TEXT_IDS

LONG_BYTES = 60 * 10**6
SHORTER_BYTES = 12 * 10**6
BRACKETS, BOMB = "tenant: brackets", "tenant: gzip bomb"
BOMB_BYTES = 512 << 20  # after decompression


def with_field(model: str, field: str, value: bytes) -> bytes:
    """A valid completion with one more field, whose JSON is `value`."""
    fixed = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 1}).encode()
    return fixed[:-1] + b"," + json.dumps(field).encode() + b":" + value + b"}"


def brackets(nbytes: int = LONG_BYTES) -> bytes:
    """`[[],[],...]`: twenty million objects for a parser that builds them."""
    return b"[" + b"[]," * (nbytes // 3) + b"[]]"


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def digits(nbytes: int = SHORTER_BYTES) -> bytes:
    """One number: a parser that converts it takes quadratic time."""
    return b"9" * nbytes


def fields(model: str, nbytes: int = SHORTER_BYTES) -> bytes:
    """A completion with about a million unknown fields."""
    many = b",".join(b'"x%d":%d' % (n, n % 10) for n in range(nbytes // 12))
    fixed = json.dumps({"model": model, "prompt": [1, 2, 3], "max_tokens": 1}).encode()
    return fixed[:-1] + b"," + many + b"}"


def escapes(nbytes: int = SHORTER_BYTES) -> bytes:
    """A string in which every character is an escape sequence."""
    return b'"' + b"\\u0041" * (nbytes // 6) + b'"'


def biases(entries: int = 200_000) -> bytes:
    """A parameter that engines refuse, with many entries."""
    return json.dumps({str(n): 1.5 for n in range(entries)}).encode()


def bomb(nbytes: int = BOMB_BYTES) -> bytes:
    """A small gzip stream of many spaces. It has several members, so that making it stays cheap."""
    part = 16 << 20
    return gzip.compress(b" " * part, 6) * (nbytes // part)


def long_prompt(model: str, tokens: int) -> tuple[bytes, bytes]:
    """The head and the tail of a valid completion. A salt goes between them, so that each request
    is prefilled as a whole."""
    draw = random.Random(tokens)
    ids = ",".join(map(str, draw.choices(TEXT_IDS, k=tokens)))
    head = f'{{"model":{json.dumps(model)},"prompt":[{ids}],"max_tokens":2,"stream":true,'
    return (
        f'{head}"temperature":0,"ignore_eos":true,"cache_salt":"'.encode(),
        b'"}',
    )


def short_prompt(model: str, salt: str, tokens: int = 1, *, stream: bool = False) -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": [5, 6, 7],
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": stream,
            "cache_salt": salt,
        }
    ).encode()


def refused_bodies(model: str, max_tokens: int) -> dict[str, list[bytes]]:
    """Bodies by the kind of attack. All are refused: engines refuse unknown fields, too."""

    def one(field: str, value: bytes) -> bytes:
        return with_field(model, field, value)

    number, text = digits(), escapes()
    return {
        BRACKETS: [one("x", brackets())],
        "tenant: nested": [
            one(field, nested(depth))
            for field in ("x", "prompt")
            for depth in (900, 100_000, 5_000_000)
        ],
        "tenant: long number": [
            one("max_tokens", number),
            one("x", b"0." + number + b"e-9"),
            one("seed", b"-" + number),
        ],
        "tenant: many fields": [fields(model)],
        "tenant: many prompts": [
            one("prompt", brackets(SHORTER_BYTES)),
            one("prompt", b"[" + b'"a",' * (SHORTER_BYTES // 4) + b'"a"]'),
            one("prompt", b"[" + b"[1]," * 256 + b"[1]]"),
            one("n", b"1000000"),
        ],
        "tenant: escapes": [one(field, text) for field in ("user", "model", "x")],
        BOMB: [bomb()],
        "tenant: refused parameter": [one("logit_bias", biases())],
        "tenant: prompt beyond the context": [
            b"beyond".join(long_prompt(model, 4 * max_tokens)),
            b"beyond".join(long_prompt(model, max_tokens)),
        ],
        "tenant: not JSON": [
            *(b"", b"{", b"\xff\xfe{}", b"[]", b"null", b'{"prompt": NaN}'),
            random.Random(0).randbytes(5_000),
        ],
    }
