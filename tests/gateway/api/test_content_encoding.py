from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.errors import InputError
from prfaas.gateway.api.content_encoding import (
    Encoding,
    TooManyBytes,
    decompress,
    encoding_of,
    most_bytes,
)

LONG = bytes(range(256)) * 4000


def uncounted(nbytes: int) -> None:
    pass


def raw_deflate(data: bytes) -> bytes:
    stream = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return stream.compress(data) + stream.flush()


def pack(data: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.compress(data)
    return zlib.compress(data) if encoding == "deflate" else raw_deflate(data)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw"])
@pytest.mark.parametrize("data", [b"", b"x", LONG, b"x" * 5_000_000])
def test_a_body_is_what_was_compressed(data: bytes, encoding: str) -> None:
    name: Encoding = "gzip" if encoding == "gzip" else "deflate"
    packed = pack(data, encoding)
    assert decompress(packed, name, len(data), uncounted) == data
    for cut in {1, len(packed) // 2, len(packed) - 1}:
        with pytest.raises(InputError, match="Content-Encoding"):
            decompress(packed[:cut], name, len(data), uncounted)
    if data:
        with pytest.raises(TooManyBytes):
            decompress(packed, name, len(data) - 1, uncounted)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "raw"])
def test_what_is_decompressed_is_counted_also_when_it_is_refused(encoding: str) -> None:
    name: Encoding = "gzip" if encoding == "gzip" else "deflate"
    bomb = bytes(20_000_000)
    packed = pack(bomb, encoding)

    def counted(data: bytes, max_bytes: int) -> int:
        parts: list[int] = []
        try:
            decompress(data, name, max_bytes, parts.append)
        except (InputError, TooManyBytes):
            pass
        assert sum(parts) <= most_bytes(len(data), name, max_bytes)
        return sum(parts)

    assert counted(packed, len(bomb)) == len(bomb)
    assert counted(packed, 3_000_000) > 3_000_000, "it has more than it may have"
    broken = packed[: len(packed) // 2]
    assert counted(broken, len(bomb)) > len(bomb) / 4, "it breaks off"
    assert counted(b"neither of them", len(bomb)) <= 1000


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=5))
def test_gzip_may_have_several_members(members: list[bytes]) -> None:
    packed = b"".join(map(gzip.compress, members))
    assert decompress(packed, "gzip", 1000, uncounted) == b"".join(members)


@given(st.binary(max_size=60), st.sampled_from(["gzip", "deflate"]))
def test_other_bytes_are_refused_or_decompressed(data: bytes, encoding: Encoding) -> None:
    try:
        decompress(data, encoding, 10_000, uncounted)
    except (InputError, TooManyBytes):
        pass


def test_many_members_are_refused() -> None:
    with pytest.raises(InputError, match="members"):
        decompress(gzip.compress(b"") * 2000, "gzip", 1000, uncounted)


def test_names_of_encodings() -> None:
    assert [encoding_of(name) for name in ("", " Identity", "GZIP", "deflate")] == [
        *("", "", "gzip", "deflate")
    ]
    for name in ("br", "gzip, gzip", "x" * 10_000):
        with pytest.raises(InputError, match="not supported") as refused:
            encoding_of(name)
        assert len(str(refused.value)) < 200
