"""What a kvd keeps: the arena, the hybrid pool over it, its SSD file.

Made by the first registration: until then nobody knows how large a page should be. Later ones must
be of the same state; what differs is named. One owner, no locks; knows nothing of transfers or
sockets.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from prfaas.cache.checkpoints import checkpoint_policy
from prfaas.cache.eviction import CostAware
from prfaas.cache.groups import rules_for, unit_bytes
from prfaas.cache.journal import Journal
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import Arena, choose_layout
from prfaas.cache.storage.ssd import SpillFile
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.messages import Register, spec_of
from prfaas.kvd.events import EventLog
from prfaas.kvspec import KVSpec
from prfaas.types import Compat, NodeId


@dataclass(frozen=True, slots=True)
class StoreOptions:
    memory_bytes: int = 4 << 30
    ssd: Path | None = None  # a folder or a file; None: no second tier
    ssd_bytes: int = 64 << 30
    checkpoints: str = "default"


@dataclass(frozen=True, slots=True)
class Shelf:
    """What exists from the first registration on."""

    spec: KVSpec
    block_tokens: int
    whole_blocks: bool
    compat: Compat
    fd: int  # of the arena
    arena: Arena
    pool: HybridPrefixPool
    ssd_fd: int | None

    @property
    def whole(self) -> int:
        """Tokens to whose multiples growing and window segments extend."""
        return self.block_tokens if self.whole_blocks else 1


class Store:
    def __init__(self, node: NodeId, options: StoreOptions, events: EventLog) -> None:
        self.node = node
        self.options = options
        self.shelf: Shelf | None = None
        self._events = events
        self._journal = Journal()

    def register(self, asked: Register) -> Shelf:
        """The shelf, made if this is the first; InputError when the engine does not fit it."""
        if self.shelf is None:
            self.shelf = self._build(asked)
            return self.shelf
        shelf = self.shelf
        differences = list(shelf.compat.differences(asked.compat))
        for name, here, there in (
            ("block_tokens", shelf.block_tokens, asked.block_tokens),
            ("whole_blocks", shelf.whole_blocks, asked.whole_blocks),
            ("groups", shelf.spec.groups, spec_of(asked.groups).groups),
        ):
            if here != there and not any(line.startswith(name) for line in differences):
                differences.append(f"{name}: {here} here, {there} there")
        if differences:
            raise InputError(
                f"engine {asked.engine_id} does not fit this kvd: {'; '.join(differences)}",
                fix="give each model and layout a kvd of its own",
            )
        return shelf

    def changed(self) -> None:
        """The pool may have stored or removed prefixes: gateways are to hear of it."""
        if self.shelf is not None:
            first = self._events.next_seq(self.node)
            self._events.add(
                self.node, self._journal.take(self.node, self.shelf.block_tokens, first)
            )

    def close(self) -> None:
        if self.shelf is not None:
            os.close(self.shelf.fd)
            if self.shelf.ssd_fd is not None:
                os.close(self.shelf.ssd_fd)
            self.shelf = None

    def _build(self, asked: Register) -> Shelf:
        if not asked.groups:
            raise InputError("a model without state", where="groups")
        spec = spec_of(asked.groups)
        layout = choose_layout(unit_bytes(spec, asked.block_tokens))
        pages = self.options.memory_bytes // layout.page_bytes
        if not pages:
            raise InputError(
                f"{self.options.memory_bytes} bytes hold no page of {layout.page_bytes}",
                where="--memory",
                fix="give more",
            )
        fd = _memory(pages * layout.page_bytes)
        arena = Arena(fd, layout.page_bytes, pages)
        ssd, ssd_fd = None, None
        if self.options.ssd is not None:
            ssd_fd = _spill_file(self.options.ssd)
            ssd = SpillFile(ssd_fd, layout.page_bytes, self.options.ssd_bytes // layout.page_bytes)
        pool = HybridPrefixPool(
            spec,
            asked.block_tokens,
            PoolStorage(layout, pages, arena, ssd),
            eviction=CostAware(rules_for(spec), layout, asked.block_tokens, _in_proportion),
            checkpoints=checkpoint_policy(self.options.checkpoints, asked.block_tokens),
            journal=self._journal,
        )
        return Shelf(
            spec,
            asked.block_tokens,
            asked.whole_blocks,
            asked.compat,
            fd,
            arena,
            pool,
            ssd_fd,
        )


def _in_proportion(new_tokens: int, cached_tokens: int) -> float:
    """Prefill time up to a factor, which eviction does not need: it compares prefixes of one
    model."""
    return float(new_tokens)


def _memory(nbytes: int) -> int:
    """Sealed, so that no process that maps it can shrink it under another's feet."""
    fd = os.memfd_create("prfaas-kvd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def _spill_file(path: Path) -> int:
    """Without a name: its table is in memory, so what a dead kvd left is of no use to the next."""
    try:
        return os.open(path, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        pass  # not a folder, or a file system without O_TMPFILE
    try:
        if path.is_dir():
            fd, name = tempfile.mkstemp(prefix="prfaas-kvd-", dir=path)
            os.unlink(name)
            return fd
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise InputError(
            f"cannot be used: {error.strerror}", file=path, where="--ssd", fix="give a folder"
        ) from None
