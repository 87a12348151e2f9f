"""Block hashes: chained SHA-256 over token ids, and their derivation from an engine's events."""

from prfaas.cache.hashing.chain import (
    PromptHashes,
    Tokens,
    block_hashes,
    chain_seed,
    tail_hash,
    token_bytes,
)
from prfaas.cache.hashing.vllm import EngineHashes, GroupNames, hash_events

__all__ = [
    "EngineHashes",
    "GroupNames",
    "PromptHashes",
    "Tokens",
    "block_hashes",
    "chain_seed",
    "hash_events",
    "tail_hash",
    "token_bytes",
]
