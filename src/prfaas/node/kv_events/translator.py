"""From the pool's `HashEvent`s back to vLLM's KV events, for routers that read those.

The kvd's events name stored and removed blocks by hash; vLLM's events also have a block's tokens,
its parent and the tenant's salt. The node has those of every prompt that it has served. Blocks that
arrived with a transfer are announced when the request that continues it brings the tokens. Pure.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from prfaas.kvspec import FullAttention, KVSpec, SlidingWindow
from prfaas.types import BlockHash, HashEvent

# Tokens are needed from a prompt's arrival until its blocks are stored, which is soon. A block of
# 64 tokens takes half a kilobyte here: 4 MiB in total.
KEPT_TOKENS = 512 << 10
_MEDIUM = "GPU"  # vLLM's name of the tier that its readers use


class _Named(NamedTuple):
    parent: BlockHash | None
    tokens: array[int]
    salt: str


class EventTranslator:
    def __init__(self, spec: KVSpec, block_tokens: int, kept_tokens: int = KEPT_TOKENS) -> None:
        self._spec = spec
        self.block_tokens = block_tokens
        self._kept_names = kept_tokens // block_tokens
        self._groups = {group.name: index for index, group in enumerate(spec.groups)}
        self._named: OrderedDict[BlockHash, _Named] = OrderedDict()  # last used last
        self._unnamed: OrderedDict[tuple[BlockHash, str], None] = OrderedDict()  # stored, no tokens

    def learn(
        self, tokens: Sequence[int], hashes: Sequence[BlockHash], salt: str
    ) -> list[dict[str, Any]]:
        """Adds a prompt's tokens and block hashes. Returns events of its blocks that were stored
        before."""
        size = self.block_tokens
        parent: BlockHash | None = None
        late: dict[str, list[BlockHash]] = {}
        for position, name in enumerate(hashes):
            if name not in self._named:
                block = array("I", tokens[position * size : (position + 1) * size])
                self._named[name] = _Named(parent, block, salt)
            self._named.move_to_end(name)
            for group in self._groups:
                if (name, group) in self._unnamed:
                    del self._unnamed[name, group]
                    late.setdefault(group, []).append(name)
            parent = name
        while len(self._named) > self._kept_names:
            self._named.popitem(last=False)
        return [event for group, names in late.items() for event in self._stored(group, names)]

    def translate(self, event: HashEvent) -> list[dict[str, Any]]:
        names = [BlockHash(name) for name in event.hashes]
        if event.action == "stored":
            unknown = [name for name in names if name not in self._named]
            self._unnamed.update(dict.fromkeys((name, event.group) for name in unknown))
            while len(self._unnamed) > self._kept_names:
                self._unnamed.popitem(last=False)
            return self._stored(event.group, [name for name in names if name in self._named])
        gone = [name for name in names if (name, event.group) not in self._unnamed]
        for name in names:
            self._unnamed.pop((name, event.group), None)
        if not gone:
            return []
        return [
            {
                "type": "BlockRemoved",
                "block_hashes": gone,
                "medium": _MEDIUM,
                "group_idx": self._groups[event.group],
            }
        ]

    def cleared(self) -> list[dict[str, Any]]:
        """The event for a pool that starts empty."""
        self._unnamed.clear()
        return [{"type": "AllBlocksCleared"}]

    def _stored(self, group: str, names: Sequence[BlockHash]) -> list[dict[str, Any]]:
        return [self._stored_run(group, run) for run in self._runs(names)]

    def _runs(self, names: Iterable[BlockHash]) -> list[list[BlockHash]]:
        """Splits the names into runs in which each block is the parent of the next."""
        runs: list[list[BlockHash]] = []
        for name in names:
            if runs and self._named[name].parent == runs[-1][-1]:
                runs[-1].append(name)
            else:
                runs.append([name])
        return runs

    def _stored_run(self, group: str, run: Sequence[BlockHash]) -> dict[str, Any]:
        blocks = [self._named[name] for name in run]
        first, kind = blocks[0], self._spec[group]
        salted = [first.salt] if first.salt and first.parent is None else None
        event: dict[str, Any] = {
            "type": "BlockStored",
            "block_hashes": list(run),
            "parent_block_hash": first.parent,
            "token_ids": [token for block in blocks for token in block.tokens],
            "block_size": self.block_tokens,
            "lora_id": None,
            "medium": _MEDIUM,
            "lora_name": None,
            "extra_keys": [salted, *([None] * (len(run) - 1))],
            "group_idx": self._groups[group],
            "kv_cache_spec_kind": "mamba",
        }
        if isinstance(kind, FullAttention):
            event["kv_cache_spec_kind"] = "full_attention"
        elif isinstance(kind, SlidingWindow):
            event["kv_cache_spec_kind"] = "sliding_window"
            event["kv_cache_spec_sliding_window"] = kind.window
        return event
