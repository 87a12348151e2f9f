"""Bodies that a client compressed: `Content-Encoding: gzip` or `deflate`. Pure."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Literal, TypeAlias

from prfaas.errors import InputError, RequestError

Encoding: TypeAlias = Literal["", "gzip", "deflate"]
_FIELD = "Content-Encoding"
_STEP_BYTES = 1 << 18
_MOST_MEMBERS = 1000  # of a gzip file: an empty member has 20 bytes
_MOST_EXPANSION = 1032  # of deflate: two bits stand for at most 258 bytes


class TooManyBytes(Exception):
    """The body has more bytes than the caller wants."""


def encoding_of(header: str) -> Encoding:
    """Raises InputError for an encoding that the gateway does not read."""
    match header.strip().lower():
        case "" | "identity":
            return ""
        case "gzip" | "x-gzip":
            return "gzip"
        case "deflate":
            return "deflate"
        case other:
            raise InputError(
                f"{_FIELD} {other[:32]!r} is not supported",
                fix="use gzip or deflate, or do not compress the body",
            )


def decompress(
    data: bytes | memoryview,
    encoding: Encoding,
    max_bytes: int,
    count: Callable[[int], None],
) -> bytes:
    """The body before it was compressed. Raises InputError when it is not in that encoding, and
    `TooManyBytes` when it has more than `max_bytes`. It takes memory for `max_bytes` at most, also
    when a few bytes stand for very many. `count` is called with the size of each part that was
    decompressed: what is refused in the end was work, too."""
    parts, nbytes = [], 0
    try:
        for part in _parts(memoryview(data), encoding):
            count(len(part))
            nbytes += len(part)
            if nbytes > max_bytes:
                raise TooManyBytes
            parts.append(part)
    except zlib.error as error:
        raise _broken(encoding, str(error)) from None
    return b"".join(parts)


def most_bytes(nbytes: int, encoding: Encoding, max_bytes: int) -> int:
    """The most bytes that `decompress` may have counted for a body of `nbytes`."""
    return min(nbytes * _MOST_EXPANSION, max_bytes + _STEP_BYTES) if encoding else nbytes


def too_large(max_bytes: int) -> RequestError:
    return RequestError(413, "body_too_large", f"the request body is larger than {max_bytes} bytes")


def _parts(data: memoryview, encoding: Encoding) -> Iterator[bytes]:
    for _ in range(_MOST_MEMBERS):
        stream = zlib.decompressobj(_window_bits(data, encoding))
        at = 0
        rest: bytes | memoryview = data[:_STEP_BYTES]
        while not stream.eof:
            part = stream.decompress(rest, _STEP_BYTES)
            if part:
                yield part
            if stream.unconsumed_tail:
                rest = stream.unconsumed_tail
                continue
            at += _STEP_BYTES
            rest = data[at : at + _STEP_BYTES]
            if not len(rest) and not part and not stream.eof:
                raise _broken(encoding, "it is incomplete")
        # The stream may have ended within what was read last.
        data = data[min(len(data), at) - len(stream.unused_data) :]
        if not len(data):
            return
        if encoding != "gzip":
            raise _broken(encoding, "bytes follow its end")
    raise _broken(encoding, f"it has more than {_MOST_MEMBERS} members")


def _window_bits(data: memoryview, encoding: Encoding) -> int:
    if encoding == "gzip":
        return 16 + zlib.MAX_WBITS
    # The standard's deflate has a zlib header; some clients leave it out.
    return zlib.MAX_WBITS if len(data) and data[0] & 0xF == 8 else -zlib.MAX_WBITS


def _broken(encoding: Encoding, problem: str) -> InputError:
    return InputError(
        f"the body is not {encoding}, which its {_FIELD} names: {problem}",
        fix="compress it again, or do not compress it",
    )
