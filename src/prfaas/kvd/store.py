"""What a kvd stores: for each form an arena and the hybrid pool over it; and the SSD file.

The first registration of an engine in a form makes them, because it determines the page size. Later
registrations in that form must have the same model and layout, and the other form the same model;
an error names each difference. The memory is for both forms together (`cache/storage/budget.py`):
each arena could hold all of it, but a memfd has memory only where it was used. Where the kernel
commits strictly, all pages are taken before the first registration (`take_memory`), for one form.
The SSD tier belongs to the form that was registered first. One owner, no locks; independent of
transfers and sockets.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import get_args

from prfaas.cache.checkpoints import checkpoint_policy
from prfaas.cache.eviction import CostAware
from prfaas.cache.groups import rules_for, unit_bytes
from prfaas.cache.journal import Journal
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import Arena, choose_layout
from prfaas.cache.storage.budget import BudgetShare, MemoryBudget
from prfaas.cache.storage.ssd import SpillFile
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.cache.units import closing_units, growing_units
from prfaas.clock import Clock, MonotonicClock
from prfaas.config.host import KvdSection
from prfaas.config.sizes import parse_bytes
from prfaas.contracts.kvd_api import MAX_POOLS, spec_of
from prfaas.errors import InputError
from prfaas.kvd.engine_socket.messages import Register
from prfaas.kvd.events import EventLog
from prfaas.kvd.ssd_worker import SsdWorker
from prfaas.kvspec import KVSpec
from prfaas.service.memory import commits_strictly, memory_limit
from prfaas.types import BlockHash, Compat, Form, NodeId

_DEFAULTS = KvdSection()
# How long a request waits for the SSD. A gateway waits 5 s for the answer to an open.
SSD_WAIT_S = 3.0
# Pages that grants leave to answers that are being written: so many answers of that length, but at
# most this part of the pool. Idle prefixes use them until then.
ANSWERS_AT_ONCE = 4
ANSWER_TOKENS = 2_048
ANSWER_PARTS = 32

# What the process takes beside the arena: Python, the index of the pools, buffers of transfers.
OWN_BYTES = 256 << 20
_LESS_MEMORY = "give less memory, or raise the limit of the container or of the host"


@dataclass(frozen=True, slots=True)
class StoreOptions:
    memory_bytes: int = parse_bytes(_DEFAULTS.memory, "memory")  # of all forms together
    ssd: Path | None = None  # a folder or a file; None: no SSD tier
    ssd_bytes: int = parse_bytes(_DEFAULTS.ssd_size, "ssd_size")
    checkpoints: str = _DEFAULTS.checkpoints


@dataclass(frozen=True, slots=True)
class Storage:
    """What exists after the first registration in a form."""

    name: NodeId  # of its cache events
    spec: KVSpec
    block_tokens: int
    whole_blocks: bool
    compat: Compat
    fd: int  # of the arena
    arena: Arena
    pool: HybridPrefixPool
    journal: Journal
    ssd_fd: int | None

    @property
    def form(self) -> Form:
        return self.compat.form

    @property
    def whole(self) -> int:
        """Attention and window segments begin and end at multiples of this many tokens."""
        return self.block_tokens if self.whole_blocks else 1


class Store:
    def __init__(
        self, node: NodeId, options: StoreOptions, events: EventLog, clock: Clock | None = None
    ) -> None:
        self.node = node
        self.options = options
        # The canonical form first, in whatever order the engine's connections have registered: the
        # first one counts for routing, and must not change when the kvd or the engine restarts.
        self.storages: tuple[Storage, ...] = ()
        self.events = events
        self._clock = clock or MonotonicClock()
        self._budget = MemoryBudget(options.memory_bytes)
        self._lease_ids = count(first_lease_id())  # one lease is of one pool only
        self._taken_fd: int | None = None  # of the memory, where the kernel commits strictly
        self._worker: SsdWorker | None = None  # of the SSD tier, if there is one
        self._keeps_answers = False  # an engine does that has registered
        self._spilling: asyncio.Task[None] | None = None  # ahead of answers

    def take_memory(self) -> None:
        """Where the kernel commits strictly, it may have no page when one is first used, and the
        process that touches it would get SIGBUS: then all pages are taken here. Call it before the
        first registration, in a thread, because it takes a second for every 8 GiB or so. Raises
        InputError when there is less memory."""
        if commits_strictly():
            self._taken_fd = _memory(self.options.memory_bytes, taken=True)

    def new_lease_id(self) -> int:
        """The id of a lease that uses the pages of another one."""
        return next(self._lease_ids)

    @property
    def first(self) -> Storage | None:
        """The storage of requests that name no form."""
        return self.storages[0] if self.storages else None

    def storage_of(self, compat: Compat | None) -> Storage | None:
        """The storage of such an engine; None: the first one. None when there is none."""
        if compat is None:
            return self.first
        return next((one for one in self.storages if one.compat == compat), None)

    def storage_named(self, name: NodeId) -> Storage | None:
        """The storage that publishes its cache events under this name."""
        return next((one for one in self.storages if one.name == name), None)

    def differences(self, compat: Compat) -> tuple[str, ...]:
        """The fields in which such an engine differs from the storage of its form, or from the
        first one when there is none of its form. Empty before the first registration."""
        nearest = self._of_form(compat.form) or self.first
        return () if nearest is None else nearest.compat.differences(compat)

    def register(self, register: Register) -> Storage:
        """The storage of the engine's form; the first call with the form makes it. InputError when
        the engine does not match it, or its model is not that of the other form."""
        if register.engine_id in _event_names(self.node):
            # Cache events are numbered by name: those of the engine would mix with the pool's.
            raise InputError(
                f"{register.engine_id!r} is a name of this kvd",
                where="engine_id",
                fix="give the engine another id",
            )
        storage = self._registered(register)
        if register.keeps_answers:
            storage.pool.set_aside(_answer_pages(storage))
            self._keeps_answers = True
        return storage

    def _registered(self, register: Register) -> Storage:
        storage = self._of_form(register.compat.form)
        if storage is None:
            self._check_model(register)
            if register.further and not self.storages:
                # Gateways take the first form for the one that counts for routing.
                raise InputError(
                    f"engine {register.engine_id} has not registered its first form yet",
                    where="further",
                    fix="register the first form on another connection, and then this one",
                )
            with ExitStack() as on_failure:
                storage = self._build(register, on_failure)
                on_failure.pop_all()
            self.storages = (*self.storages, storage)
            return storage
        spec = spec_of(register.groups)
        differences = list(storage.compat.differences(register.compat))
        for name, here, there in (
            ("block_tokens", storage.block_tokens, register.block_tokens),
            ("whole_blocks", storage.whole_blocks, register.whole_blocks),
            ("groups", storage.spec.groups, spec.groups),
        ):
            if name == "groups" and _same_bytes(storage.spec, spec):
                continue
            if here != there and not any(line.startswith(name) for line in differences):
                differences.append(f"{name}: {here} here, {there} there")
        if differences:
            raise InputError(
                f"engine {register.engine_id} does not match this kvd: {'; '.join(differences)}",
                fix="run one kvd for each model and layout; after an upgrade, restart the kvd, too",
            )
        return storage

    def publish_changes(self) -> None:
        """Publishes cache events for what the pools have stored or removed since the last call."""
        for storage in self.storages:
            name = storage.name
            first = self.events.next_seq(name)
            self.events.add(name, storage.journal.take(name, storage.block_tokens, first))

    def needs_preparation(self, storage: Storage) -> bool:
        """Whether `prepared` may have to wait."""
        return self._worker is not None and storage.ssd_fd is not None

    @asynccontextmanager
    async def prepared(
        self,
        storage: Storage | None,
        hashes: Sequence[bytes],
        tokens: int | None = None,
        checkpoint_tokens: Sequence[int] | None = None,
        more_checkpoints: Sequence[int] = (),
        tenant: str = "",
    ) -> AsyncIterator[None]:
        """Within the block, `reserve` (or `pin`, with `tokens` of None) of the pool finds the
        prefix in memory, and room, as far as the SSD tier could provide them in time. See
        `HybridPrefixPool.prepare`. Never waits for a storage without an SSD tier."""
        preparation = None
        if storage is not None and self.needs_preparation(storage):
            names = [BlockHash(name) for name in hashes]
            try:
                preparation = storage.pool.prepare(
                    names,
                    tokens,
                    checkpoint_tokens=checkpoint_tokens,
                    more_checkpoints=more_checkpoints,
                    tenant=tenant,
                )
            except InputError:
                pass  # the reservation will raise it
        if storage is None or preparation is None or self._worker is None:
            yield
            return
        try:
            await self._worker.carry_out(preparation, SSD_WAIT_S)
            yield
        finally:
            preparation.end(self._clock.now())
            self.publish_changes()
            self.spill_ahead(storage)

    def spill_ahead(self, storage: Storage) -> None:
        """Starts to make the pages free that the next answers need, by spilling to the SSD tier: an
        answer does not wait, and would drop what it evicts. Without effect on a storage that has no
        SSD tier or keeps no answers. Does not wait."""
        if not self._keeps_answers or self._worker is None or storage.ssd_fd is None:
            return
        if self._spilling is None or self._spilling.done():
            running = self._worker.run_all(storage.pool.spill_ahead)
            self._spilling = asyncio.get_running_loop().create_task(running)

    def close(self) -> None:
        """Waits for the SSD's thread, for a limited time."""
        if self._spilling is not None:
            self._spilling.cancel()
        # A thread that is stuck in the file must not find another file under its number.
        stopped = self._worker is None or self._worker.close()
        for storage in self.storages:
            os.close(storage.fd)
            if stopped and storage.ssd_fd is not None:
                os.close(storage.ssd_fd)
        if self._taken_fd is not None:
            os.close(self._taken_fd)
            self._taken_fd = None
        self.storages = ()
        self._worker = None

    def _of_form(self, form: Form) -> Storage | None:
        return next((one for one in self.storages if one.form == form), None)

    def _check_model(self, register: Register) -> None:
        """InputError when a form of another model is registered here already."""
        assert len(self.storages) < MAX_POOLS, "one for each form"
        for storage in self.storages:
            here, there = storage.compat, register.compat
            if (here.model, here.revision) != (there.model, there.revision):
                differences = (
                    f"{name}: {getattr(here, name)!r} here, {getattr(there, name)!r} there"
                    for name in ("model", "revision")
                    if getattr(here, name) != getattr(there, name)
                )
                raise InputError(
                    f"engine {register.engine_id} registers the {there.form} form of another model "
                    f"than the {here.form} form here: {'; '.join(differences)}",
                    where="compat",
                    fix="run one kvd for each model; after an upgrade, restart the kvd, too",
                )

    def _build(self, register: Register, on_failure: ExitStack) -> Storage:
        """`on_failure` closes the files when the registration fails."""
        if not register.groups:
            raise InputError("the model has no KV groups", where="groups")
        spec, form = spec_of(register.groups), register.compat.form
        layout = choose_layout(unit_bytes(spec, register.block_tokens))
        pages = self.options.memory_bytes // layout.page_bytes
        if not pages:
            raise InputError(
                f"{self.options.memory_bytes} bytes are less than one page ({layout.page_bytes})",
                where="--memory",
                fix="give more memory",
            )
        if self._taken_fd is not None and self.storages:
            raise InputError(
                f"this kvd has memory for one form, and the {self.storages[0].form} form has it, "
                "because the kernel commits strictly (vm.overcommit_memory is 2)",
                where="compat",
                fix='let engines have one form ("form" in kv_connector_extra_config), or set '
                "vm.overcommit_memory to 0 and restart the kvd",
            )
        share = self._share(form, layout.page_bytes)
        on_failure.callback(share.leave)
        if self._taken_fd is None:
            fd = _memory(pages * layout.page_bytes)
        else:
            fd = os.dup(self._taken_fd)  # a registration that fails leaves the memory
        on_failure.callback(os.close, fd)
        arena = _mapped(fd, layout.page_bytes, pages)
        ssd, ssd_fd = None, None
        if self.options.ssd is not None and not self.storages:
            ssd_fd = _spill_file(self.options.ssd)
            on_failure.callback(os.close, ssd_fd)
            ssd = SpillFile(ssd_fd, layout.page_bytes, self.options.ssd_bytes // layout.page_bytes)
        journal = Journal()
        pool = HybridPrefixPool(
            spec,
            register.block_tokens,
            PoolStorage(layout, pages, arena, ssd, share),
            eviction=CostAware(rules_for(spec), layout, register.block_tokens, _in_proportion),
            checkpoints=checkpoint_policy(self.options.checkpoints, register.block_tokens),
            journal=journal,
            lease_ids=self._lease_ids,
        )
        if ssd is not None:
            self._worker = SsdWorker(self._clock, self.publish_changes)
        return Storage(
            name=NodeId(f"{self.node}/{form}") if self.storages else self.node,
            spec=spec,
            block_tokens=register.block_tokens,
            whole_blocks=register.whole_blocks,
            compat=register.compat,
            fd=fd,
            arena=arena,
            pool=pool,
            journal=journal,
            ssd_fd=ssd_fd,
        )

    def _share(self, form: Form, page_bytes: int) -> BudgetShare:
        share = self._budget.join(page_bytes)
        if share is None:
            needed = max(page_bytes, self._budget.guaranteed_bytes)
            others = " and ".join(storage.form for storage in self.storages)
            raise InputError(
                f"the {others} form has taken so much of the memory ({self._budget.nbytes} bytes) "
                f"that less than {needed} bytes are left for the {form} form",
                where="--memory",
                fix="restart the kvd, or give it more memory",
            )
        return share


def _event_names(node: NodeId) -> set[str]:
    """The names of cache events of a kvd's pools, also of those that do not exist yet."""
    return {node, *(f"{node}/{form}" for form in get_args(Form))}


def _same_bytes(here: KVSpec, there: KVSpec) -> bool:
    """Whether an engine with the groups `there` can use this pool. A group without heads (1) is
    written in whole layers, also where other engines write it by heads."""
    return len(here.groups) == len(there.groups) and all(
        one == (replace(other, heads=one.heads) if other.heads == 1 else other)
        for one, other in zip(here.groups, there.groups, strict=True)
    )


def first_lease_id() -> int:
    """Random, because a lease of an earlier process must not be valid in this one. Below 2**53,
    which every message format can represent."""
    return 1 + secrets.randbelow(1 << 52)


def _answer_pages(storage: Storage) -> int:
    """The pages that grants leave to answers that are being written."""
    layout, rules = storage.pool.layout, storage.pool.rules
    units = [*growing_units(rules, storage.block_tokens, _no_runs(storage), ANSWER_TOKENS)]
    units += closing_units(rules, storage.block_tokens, ANSWER_TOKENS)
    pages = sum(layout.pages(unit.key[0]) for unit in units)
    return min(ANSWERS_AT_ONCE * pages, storage.arena.pages // ANSWER_PARTS)


def _no_runs(storage: Storage) -> dict[int, int]:
    return {group: 0 for group, rule in enumerate(storage.pool.rules) if rule.kind == "full"}


def _in_proportion(new_tokens: int, cached_tokens: int) -> float:
    """Prefill time up to a constant factor. Eviction does not need the factor: it compares
    prefixes of one model."""
    return float(new_tokens)


def check_memory(nbytes: int) -> None:
    """InputError where this process could never fill an arena of this size: it would be killed when
    the pool is nearly full, which may be weeks later."""
    limit = memory_limit()
    if limit is not None and nbytes + OWN_BYTES > limit:
        raise InputError(
            f"an arena of {nbytes} bytes cannot be made: this process may have {limit} bytes, of "
            f"which it needs {OWN_BYTES} itself, so that {max(0, limit - OWN_BYTES)} are left",
            where="--memory",
            fix=_LESS_MEMORY,
        )


def _memory(nbytes: int, *, taken: bool = False) -> int:
    """Sealed: a process that maps the memory cannot shrink it while another process uses it. Its
    pages come when they are used, or now when they are to be `taken`, which a full /dev/shm does
    not prevent: the file lies in none."""
    fd = os.memfd_create("prfaas-kvd", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, nbytes)
        if taken:
            os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        os.close(fd)
        raise _no_memory(nbytes, error) from None
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    return fd


def _mapped(fd: int, page_bytes: int, pages: int) -> Arena:
    try:
        return Arena(fd, page_bytes, pages)
    except OSError as error:
        raise _no_memory(page_bytes * pages, error) from None


def _no_memory(nbytes: int, error: OSError) -> InputError:
    return InputError(
        f"an arena of {nbytes} bytes cannot be made: {error.strerror}",
        where="--memory",
        fix=_LESS_MEMORY,
    )


def _spill_file(path: Path) -> int:
    """A file without a name: its index is in memory, so a restarted kvd could not read it."""
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
            f"the SSD file cannot be opened: {error.strerror}",
            file=path,
            where="--ssd",
            fix="give a folder",
        ) from None
