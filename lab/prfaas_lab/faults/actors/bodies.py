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
# Requests of a valid form whose work is far beyond their size.
GRAMMAR, STOPS, SEQUENCES = "tenant: grammar", "tenant: stop strings", "tenant: many sequences"
TOKENIZE, COMPRESSED = "tenant: tokenize", "tenant: compressed text"
STOP_CHARS = 1_024  # the longest that are accepted, as many as are accepted
MOST_STOPS = 16
WORK_TOKENS = 64  # of each answer
TOKENIZED_BYTES = 250_000
TEXT_BYTES = 15 * 10**6  # after decompression: some 100 KB on the wire


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


def _grammar(draw: random.Random) -> dict[str, object]:
    """A grammar that no cache knows, and whose automaton is far larger than its text."""
    a, b, c, d = (draw.randrange(45, 75) for _ in range(4))
    grammars: tuple[dict[str, object], ...] = (
        {
            "grammar": f"start: T\nT: /.*a.{{{a}}}.*/ & /.*b.{{{b}}}.*/ "
            f"& ~/.*c.{{{c}}}.*/ & ~/.*d.{{{d}}}/"
        },
        {"regex": f"((a{{1,{10 * a}}}|b){{1,{10 * b}}}c?){{1,{10 * c}}}"},
        {
            "json": {
                "type": "object",
                "properties": {
                    f"k{n}": {"type": "string", "pattern": f"^.*a.{{{n % 50 + a}}}$"}
                    for n in range(200)
                },
            }
        },
    )
    return draw.choice(grammars)


def work_body(kind: str, model: str, draw: random.Random, salt: str) -> bytes:
    """A body of a few kilobytes that is valid, or is refused only after work."""
    fields: dict[str, object] = {
        "model": model,
        "prompt": [5, 6, 7],
        "max_tokens": WORK_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "cache_salt": salt,
    }
    match kind:
        case "tenant: grammar":
            fields["structured_outputs"] = _grammar(draw)
        case "tenant: stop strings":
            chars = draw.choice((STOP_CHARS, 60_000))
            fields["stop"] = [draw.choice(" aex") * (chars - n) for n in range(MOST_STOPS)]
            fields["n"] = 4
        case "tenant: many sequences":
            fields["n"] = 64
        case "tenant: tokenize":
            text = f"{salt} " + "several words " * (TOKENIZED_BYTES // 14)
            return json.dumps({"model": model, "prompt": text}).encode()
    return json.dumps(fields).encode()


def compressed_text(model: str, nbytes: int = TEXT_BYTES) -> bytes:
    """A prompt far beyond every context, in gzip: it is refused only after it was unpacked."""
    text = "x y " * (nbytes // 4)
    return gzip.compress(json.dumps({"model": model, "prompt": text}).encode(), 6)


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
