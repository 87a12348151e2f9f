"""Hybrid prefix cache: block hashes, the pool of one host, the index over all hosts."""

from prfaas.cache.hashing import EngineHashes, PromptHashes, block_hashes, hash_events
from prfaas.cache.index import NodeInfo, NodeMatch
from prfaas.cache.lease import Lease, LeaseId, Match
from prfaas.cache.manager import CopyProposal, GlobalKVManager, PromptMatch
from prfaas.cache.pool import HybridPrefixPool

__all__ = [
    "CopyProposal",
    "EngineHashes",
    "GlobalKVManager",
    "HybridPrefixPool",
    "Lease",
    "LeaseId",
    "Match",
    "NodeInfo",
    "NodeMatch",
    "PromptHashes",
    "PromptMatch",
    "block_hashes",
    "hash_events",
]
