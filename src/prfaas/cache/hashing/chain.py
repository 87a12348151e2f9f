"""Block hashes: a block's name depends on every token up to its end, the tenant and the adapter.

    seed = SHA-256(version, salt, adapter, block_tokens)
    h[0] = SHA-256(seed || tokens of block 0 || extra 0)
    h[i] = SHA-256(h[i-1] || tokens of block i || extra i)      tokens: little-endian uint32

SHA-256, because a collision would serve one user another user's KV. Chained over digests instead of
one running hash, because an engine's event has only the new tokens and the parent's name. `extra`
is empty for text and holds anything else that changes a block's content (an image, embeddings).
Only whole blocks have a name; `tail_hash` identifies the tokens after the last one. Hashes of
different block sizes never collide, because the seed includes the size.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, repeat
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.errors import InputError
from prfaas.types import BlockHash

Tokens: TypeAlias = "Sequence[int] | array[int] | npt.NDArray[np.integer[Any]]"

TOKEN_BYTES = 4
_VERSION = "prfaas.block.1"
_MAX_TOKEN = 2**32 - 1


@lru_cache(maxsize=256)  # tenants and adapters whose prompts are hashed again and again
def chain_seed(block_tokens: int, *, salt: str = "", adapter: str = "") -> BlockHash:
    """The parent of a prompt's first block. Without the salt no block hash can be computed."""
    if block_tokens < 1:
        raise InputError(f"block_tokens is {block_tokens}", fix="use at least 1")
    parts = msgspec.msgpack.encode((_VERSION, salt, adapter, block_tokens))
    return BlockHash(hashlib.sha256(parts).digest())


def token_bytes(tokens: Tokens) -> bytes:
    """The tokens as little-endian uint32. Arrays of uint32 cost one copy, lists one pass (`array`
    is three times as fast at it as numpy)."""
    if isinstance(tokens, np.ndarray):
        return _from_numpy(tokens)
    if not (isinstance(tokens, array) and tokens.typecode == "I"):
        try:
            tokens = array("I", tokens)
        except (TypeError, OverflowError, ValueError) as error:
            raise InputError(
                f"not token ids: {error}", fix="use integers from 0 to 2^32 - 1"
            ) from None
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def block_hashes(
    tokens: Tokens,
    block_tokens: int,
    *,
    salt: str = "",
    adapter: str = "",
    parent: BlockHash | None = None,
    extras: Sequence[bytes] = (),
) -> list[BlockHash]:
    """Names of the whole blocks of `tokens`; a partial last block has none.

    `parent` continues an earlier chain of the same block size (salt and adapter are in it already).
    `extras[i]`, where given, is bound to block i.
    """
    last = parent if parent is not None else chain_seed(block_tokens, salt=salt, adapter=adapter)
    return _chain(last, token_bytes(tokens), block_tokens, extras)


def tail_hash(
    tokens: Tokens,
    hashes: Sequence[BlockHash],
    block_tokens: int,
    *,
    salt: str = "",
    adapter: str = "",
) -> bytes:
    """Hash of the tokens after the last whole block (`hashes` are those of the whole blocks), bound
    to everything before them; empty when the prompt ends at a block boundary.

    It is not a block hash: no cache is searched by it. A holder of the previous block's hash could
    guess the few tokens from it, so it travels only together with the state itself.
    """
    rest = tokens[len(hashes) * block_tokens :]
    if not len(rest):
        return b""
    parent = hashes[-1] if hashes else chain_seed(block_tokens, salt=salt, adapter=adapter)
    return hashlib.sha256(b"tail" + parent + token_bytes(rest)).digest()


class PromptHashes:
    """One prompt's block hashes at every requested block size, each computed once.

    Nodes differ in block size (vLLM's depends on model and tensor parallelism), so a prompt has one
    chain per size in use.
    """

    __slots__ = ("_at", "_data", "adapter", "salt")

    def __init__(self, tokens: Tokens, *, salt: str = "", adapter: str = "") -> None:
        self._data = token_bytes(tokens)
        self._at: dict[int, list[BlockHash]] = {}
        self.salt = salt
        self.adapter = adapter

    @property
    def tokens(self) -> int:
        return len(self._data) // TOKEN_BYTES

    def at(self, block_tokens: int) -> list[BlockHash]:
        """Hashes of the whole blocks; the caller must not change the list."""
        hashes = self._at.get(block_tokens)
        if hashes is None:
            seed = chain_seed(block_tokens, salt=self.salt, adapter=self.adapter)
            hashes = self._at[block_tokens] = _chain(seed, self._data, block_tokens)
        return hashes

    def prefix(self, tokens: int) -> PromptHashes:
        """The first `tokens` tokens as a separate prompt that shares the hashes computed so far."""
        part = PromptHashes((), salt=self.salt, adapter=self.adapter)
        part._data = self._data[: tokens * TOKEN_BYTES]
        for size, hashes in self._at.items():
            part._at[size] = hashes[: tokens // size]
        return part

    def __repr__(self) -> str:
        return f"PromptHashes({self.tokens} tokens, at block sizes {sorted(self._at)})"


def _chain(
    digest: bytes, data: bytes, block_tokens: int, extras: Sequence[bytes] = ()
) -> list[BlockHash]:
    step = block_tokens * TOKEN_BYTES
    whole = np.frombuffer(data, dtype=f"V{step}", count=len(data) // step)
    pieces = cast(list[bytes], whole.tolist())
    fresh = hashlib.sha256().copy
    hashes: list[bytes] = []
    if extras:
        for piece, extra in zip(pieces, chain(extras, repeat(b"")), strict=False):
            digest = hashlib.sha256(digest + piece + extra).digest()
            hashes.append(digest)
        return cast(list[BlockHash], hashes)
    # The same for text, on which a gateway spends most of its time with a long prompt. Cutting
    # with numpy, copying an empty hash object and avoiding every avoidable call save a third.
    for piece in pieces:
        sha256 = fresh()
        sha256.update(digest + piece)
        digest = sha256.digest()
        hashes.append(digest)
    return cast(list[BlockHash], hashes)


def _from_numpy(tokens: npt.NDArray[np.integer[Any]]) -> bytes:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(
            f"not token ids: an array of {tokens.dtype} with {tokens.ndim} dimensions",
            fix="use a one-dimensional array of integers",
        )
    if tokens.dtype.newbyteorder("<") != np.dtype("<u4") and len(tokens):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > _MAX_TOKEN:
            raise InputError(
                f"not token ids: values from {low} to {high}", fix="use integers from 0 to 2^32 - 1"
            )
    return tokens.astype("<u4", copy=False).tobytes()
