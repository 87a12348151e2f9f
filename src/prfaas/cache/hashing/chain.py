"""Block hashes: the name of a block says every token up to its end, the tenant and the adapter.

    seed = SHA-256(version, salt, adapter, block_tokens)
    h[0] = SHA-256(seed || tokens of block 0 || extra 0)
    h[i] = SHA-256(h[i-1] || tokens of block i || extra i)      tokens: little-endian uint32

SHA-256, because a collision would serve one user another's KV. Chained over digests instead of one
running hash, because an engine's event brings the new tokens and its parent's name only. `extra` is
empty for text; anything else that changes a block's content (an image, embeddings) goes in there.
Only whole blocks have a name. Hashes of different block sizes never meet: the seed holds the size.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Sequence
from typing import Any, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.errors import InputError
from prfaas.types import BlockHash

Tokens: TypeAlias = Sequence[int] | array[int] | npt.NDArray[np.integer[Any]]

TOKEN_BYTES = 4
_VERSION = "prfaas.block.1"
_MAX_TOKEN = 2**32 - 1


def chain_seed(block_tokens: int, *, salt: str = "", adapter: str = "") -> BlockHash:
    """What the first block of a prompt is chained to. Without the salt nobody can name a block."""
    if block_tokens < 1:
        raise InputError(f"block_tokens is {block_tokens}", fix="it must be at least 1")
    parts = msgspec.msgpack.encode((_VERSION, salt, adapter, block_tokens))
    return BlockHash(hashlib.sha256(parts).digest())


def token_bytes(tokens: Tokens) -> bytes:
    """Little-endian uint32, whatever holds the tokens. Arrays of uint32 cost one copy; lists one
    pass (`array` is three times as fast at it as numpy)."""
    if isinstance(tokens, np.ndarray):
        return _from_numpy(tokens)
    if not (isinstance(tokens, array) and tokens.typecode == "I"):
        try:
            tokens = array("I", tokens)
        except (TypeError, OverflowError, ValueError) as error:
            raise InputError(
                f"not token ids: {error}", fix="use integers of 0 to 2^32 - 1"
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
    data = token_bytes(tokens)
    step = block_tokens * TOKEN_BYTES
    whole = len(data) // step
    if extras:
        pieces = (
            data[i * step : (i + 1) * step] + (extras[i] if i < len(extras) else b"")
            for i in range(whole)
        )
        return _chain(last, pieces)
    # The same as _chain, written out: this loop is what a gateway spends on a long prompt.
    sha256 = hashlib.sha256
    hashes: list[BlockHash] = []
    digest: bytes = last
    for start in range(0, whole * step, step):
        digest = sha256(digest + data[start : start + step]).digest()
        hashes.append(BlockHash(digest))
    return hashes


class PromptHashes:
    """One prompt's block hashes at every block size that somebody asks for, each computed once.

    Nodes choose their own block sizes (vLLM's depends on model and tensor parallelism), so a prompt
    has one chain per size in use.
    """

    __slots__ = ("_at", "_data", "adapter", "salt", "tokens")

    def __init__(self, tokens: Tokens, *, salt: str = "", adapter: str = "") -> None:
        self._data: npt.NDArray[np.integer[Any]] = np.frombuffer(token_bytes(tokens), dtype="<u4")
        self._at: dict[int, list[BlockHash]] = {}
        self.tokens = len(self._data)
        self.salt = salt
        self.adapter = adapter

    def at(self, block_tokens: int) -> list[BlockHash]:
        """Hashes of the whole blocks; the caller must not change the list."""
        hashes = self._at.get(block_tokens)
        if hashes is None:
            hashes = block_hashes(self._data, block_tokens, salt=self.salt, adapter=self.adapter)
            self._at[block_tokens] = hashes
        return hashes

    def prefix(self, tokens: int) -> PromptHashes:
        """The first `tokens` tokens as a prompt of their own; hashes known already are shared."""
        part = PromptHashes(self._data[:tokens].copy(), salt=self.salt, adapter=self.adapter)
        for size, hashes in self._at.items():
            part._at[size] = hashes[: tokens // size]
        return part

    def __repr__(self) -> str:
        return f"PromptHashes({self.tokens} tokens, at block sizes {sorted(self._at)})"


def _chain(last: bytes, pieces: Any) -> list[BlockHash]:
    hashes: list[BlockHash] = []
    for piece in pieces:
        last = hashlib.sha256(last + piece).digest()
        hashes.append(BlockHash(last))
    return hashes


def _from_numpy(tokens: npt.NDArray[np.integer[Any]]) -> bytes:
    if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
        raise InputError(
            f"not token ids: an array of {tokens.dtype} with {tokens.ndim} axes",
            fix="use one axis of integers",
        )
    if tokens.dtype.newbyteorder("<") != np.dtype("<u4") and len(tokens):
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high > _MAX_TOKEN:
            raise InputError(
                f"not token ids: values from {low} to {high}", fix="use integers of 0 to 2^32 - 1"
            )
    return tokens.astype("<u4", copy=False).tobytes()
