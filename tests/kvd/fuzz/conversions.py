"""Conversions between an engine's memory and the pages of a kvd, steered by mutated numbers.

Three kinds of cases, all in this process:

    tickets     a kvd's answer with changed pages, units and lengths, and segments that no lease has
    tokens      attention: caches, forms, blocks, tokens and pages that do not fit together
    states      the same for linear layers

A conversion may be refused with one of the project's errors, or be carried out. It is a defect when
it raises anything else, reads or writes a byte outside of the pages of its units or of the blocks
that it was given, or leaves a lease at the kvd that the engine cannot end. A copy that leaves the
memory of a mapping ends this process.
"""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import msgspec
import torch

from prfaas.cache.lease import Lease
from prfaas.cache.storage.arena import Arena
from prfaas.cache.storage.places import PageTable
from prfaas.errors import InputError, PrfaasError, WireError
from prfaas.integrations.canonical import (
    AttentionConverter,
    AttentionForm,
    ConvShare,
    Packing,
    StateConverter,
    StateForm,
)
from prfaas.integrations.canonical.block_rows import block_rows, blocks_of
from prfaas.kvd.engine_socket.leases import MappedArena, ReadLease, WriteLease
from prfaas.kvd.engine_socket.messages import (
    Answer,
    Call,
    Done,
    LeaseTicket,
    NumberedAnswer,
    SegmentName,
    UnitPages,
    decode_answer,
    units_of,
)
from prfaas.kvspec import KVSpec, LinearState, Segment, segment_bytes
from prfaas.kvspec.parts import Part
from prfaas_lab.testing.hostile import INTEGERS, mutate
from tests.cache.builders import BLOCK, SPECS, hashes_of, layout_of, make_pool
from tests.integrations.canonical.caches import Pages
from tests.kvd.fuzz.oracle import FuzzFailure
from tests.kvd.fuzz.sessions import with_heads

PAGES = 400
SEGMENTS = 12  # of each lease
# Sizes that an allocation of this test cannot have.
SMALL = (-5, -1, 0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 64)
PACKINGS: tuple[Packing, ...] = ("content", "planes", "cpu_vec", "cpu_amx", "cpu_bfmmla", "mla")
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int7", "")
CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64)
GUARD_BYTES = 256
MUTATED = 0.1  # of the numbers of a case
T = TypeVar("T")


@dataclass
class Conversions:
    cases: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


def fuzz_conversions(
    wanted: int, seed: int, *, first_case: int = 0, show: Callable[[float], None] = lambda _: None
) -> Conversions:
    """Runs that many cases. FuzzFailure names the one that has shown a defect."""
    done = Conversions()
    kinds = (_tickets, _tokens, _states)
    for case in range(first_case, first_case + wanted):
        rng = random.Random(f"{seed}/{case}")
        kind = kinds[case % len(kinds)]
        try:
            kind(rng, done.outcomes)
        except Exception as error:
            name = f"seed {seed}, case {case} ({kind.__name__.strip('_')})"
            raise FuzzFailure(f"{name}: {error!r}") from error
        done.cases += 1
        if done.cases % 64 == 0:
            show(done.cases)
    return done


# Tickets ------------------------------------------------------------------------------------------


class _Kvd:
    """What the leases of an engine tell their kvd."""

    gone = False

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def call(self, call: Call) -> Answer:
        self.calls.append(call)
        return Done()

    def ready(self, lease_id: int, segment: SegmentName) -> None:
        pass


def _tickets(rng: random.Random, outcomes: Counter[str]) -> None:
    spec = SPECS[rng.choice(sorted(SPECS))]
    if rng.random() < 0.3:
        spec = with_heads(spec, 4)
    layout = layout_of(spec)
    memory = os.memfd_create("conversions")
    try:
        # The pages after the arena are of another process.
        os.ftruncate(memory, (PAGES + 8) * layout.page_bytes)
        arena = Arena(memory, layout.page_bytes, PAGES)
        beyond = Arena(memory, layout.page_bytes, PAGES + 8)
    finally:
        os.close(memory)
    pool = make_pool(spec, pages=PAGES, arena=arena)
    prompt = [rng.randrange(100) for _ in range(rng.randint(1, 40))]
    found = prompt[: rng.randrange(len(prompt) + 1) // BLOCK * BLOCK]
    if found:
        first = pool.reserve(hashes_of(found), len(found), now=0.0)
        assert isinstance(first, Lease)
        pool.commit(first.id, 0.0)
        pool.release(first.id, 0.0)
    lease = pool.reserve(hashes_of(prompt), len(prompt), now=0.0)
    assert isinstance(lease, Lease)
    tables = pool.tables(lease.id)
    ticket = LeaseTicket(
        lease_id=lease.id,
        tokens=lease.tokens,
        match_tokens=lease.match.tokens,
        skip_tokens=dict(lease.skip_tokens),
        checkpoint_tokens=lease.checkpoint_tokens,
        readable=units_of(tables.readable),
        writable=units_of(tables.writable),
    )
    mutated = _mutated_ticket(ticket, rng)
    if mutated is None:
        outcomes["ticket refused as a message"] += 1
        return
    mapped = MappedArena(spec, BLOCK, arena)
    try:
        read = ReadLease(mutated, mapped, _Kvd())
        write = WriteLease(mutated, mapped, _Kvd(), msgspec.UNSET)  # type: ignore[arg-type]
    except InputError:
        outcomes["ticket refused"] += 1
        return
    whole = beyond.view(0, (PAGES + 8) * layout.page_bytes)
    for segment in _segments(spec, mutated, rng):
        _use(read, write, mapped, segment, whole, outcomes, rng)


def _mutated_ticket(ticket: LeaseTicket, rng: random.Random) -> LeaseTicket | None:
    """None when no connection would deliver it. Tickets that another process of the engine passes
    on are not decoded here."""
    if rng.random() < 0.4:
        return _other_pages(ticket, rng)
    value = msgspec.to_builtins(NumberedAnswer(1, ticket), builtin_types=(bytes,))
    for _ in range(rng.randint(0, 2)):
        value = mutate(value, rng)
    try:
        body = msgspec.msgpack.encode(value)
    except (OverflowError, TypeError, ValueError, UnicodeError, RecursionError):
        return None
    try:
        answer = decode_answer(body).answer
    except WireError:
        return None
    return answer if isinstance(answer, LeaseTicket) else None


def _other_pages(ticket: LeaseTicket, rng: random.Random) -> LeaseTicket:
    def changed(units: tuple[UnitPages, ...]) -> tuple[UnitPages, ...]:
        mutant = list(units)
        for _ in range(rng.randint(0, 2) if mutant else 0):
            at = rng.randrange(len(mutant))
            group, where, pages = mutant[at].group, mutant[at].where, list(mutant[at].pages)
            match rng.randrange(5):
                case 0 if pages:
                    pages[rng.randrange(len(pages))] = rng.choice((*INTEGERS, PAGES, PAGES - 1))
                case 1:
                    pages = pages[: rng.randrange(len(pages) + 1)]
                case 2:
                    pages += pages
                case 3:
                    group = rng.choice((*INTEGERS, 0, 1, 2, 3))
                case 4:
                    where = rng.choice((*INTEGERS, where + 1, where + BLOCK))
            mutant[at] = UnitPages(group, where, tuple(pages))
        return tuple(mutant)

    return msgspec.structs.replace(
        ticket, readable=changed(ticket.readable), writable=changed(ticket.writable)
    )


def _segments(spec: KVSpec, ticket: LeaseTicket, rng: random.Random) -> Iterator[Segment]:
    """Most are of the lease; the others have one number or the group changed."""
    stop = min(ticket.tokens, 1_000) or 1
    for _ in range(SEGMENTS):
        group = rng.choice(spec.groups)
        linear = isinstance(group, LinearState)
        last = rng.choice((stop, *ticket.checkpoint_tokens)) if linear else rng.randint(1, stop)
        first = 0 if linear or not 0 < last < 1_000 else rng.choice((0, rng.randrange(last)))
        segment = Segment(group.name, rng.choice(group.layers), first, last)
        match rng.randrange(8):
            case 0:
                segment = replace(segment, start=rng.choice(INTEGERS))
            case 1:
                segment = replace(segment, stop=rng.choice(INTEGERS))
            case 2:
                segment = replace(segment, layer=rng.choice(INTEGERS))
            case 3:
                segment = replace(segment, group=rng.choice(("", "full0", "linear0", "x")))
        yield segment


def _use(
    read: ReadLease,
    write: WriteLease,
    mapped: MappedArena,
    segment: Segment,
    memory: memoryview,
    outcomes: Counter[str],
    rng: random.Random,
) -> None:
    table, written = mapped.table(read.ticket.readable), mapped.table(write.ticket.writable)
    others = [replace(segment, layer=layer) for layer in _layers(mapped.spec, segment)]
    ways: tuple[tuple[str, PageTable, Callable[[], Sequence[memoryview]]], ...] = (
        ("read", table, lambda: read.views(segment)),
        ("read mapped", table, lambda: read.mapped_views(segment).views()),
        ("read mapped", table, lambda: read.mapped_views(segment).part(1, 9).views()),
        ("read jointly", table, lambda: read.joint_views(others)),
        ("write", written, lambda: write.buffers(segment)),
        ("write mapped", written, lambda: write.mapped_buffers(segment).views()),
        ("write jointly", written, lambda: write.joint_buffers(others)),
    )
    for name, pages, call in ways:
        try:
            views = call()
        except PrfaasError:
            outcomes[f"{name} refused"] += 1
            continue
        outcomes[name] += 1
        segments = others if "jointly" in name else [segment]
        nbytes = sum(segment_bytes(mapped.spec, one) for one in segments)
        found = sum(view.nbytes for view in views)
        if found != nbytes and not (name == "read mapped" and found == min(8, nbytes - 1)):
            raise FuzzFailure(f"{name}: {found} bytes instead of {nbytes} for {segment}")
        if name.startswith("write"):
            _check_written(views, pages, mapped, segment, memory, rng)


def _layers(spec: KVSpec, segment: Segment) -> Sequence[int]:
    try:
        return (*spec[segment.group].layers[:1], segment.layer)
    except KeyError:
        return (segment.layer,)


def _check_written(
    views: Sequence[memoryview],
    table: PageTable,
    mapped: MappedArena,
    segment: Segment,
    memory: memoryview,
    rng: random.Random,
) -> None:
    """Writes to the views, and finds every other byte as it was."""
    before = bytes(memory)
    for view in views:
        view[:] = rng.randbytes(view.nbytes)
    after, size = bytes(memory), mapped.arena.page_bytes
    group = next(n for n, one in enumerate(mapped.spec.groups) if one.name == segment.group)
    own = {page for (number, _), pages in table.items() if number == group for page in pages}
    for page in range(len(before) // size):
        here = slice(page * size, (page + 1) * size)
        if page not in own and before[here] != after[here]:
            raise FuzzFailure(f"page {page} is not of the units of {segment}, and was written")


# Tokens and states --------------------------------------------------------------------------------


class _Guarded:
    """A tensor in the middle of memory whose other bytes must not change."""

    def __init__(
        self, shape: Sequence[int], dtype: torch.dtype, order: Sequence[int], rng: random.Random
    ) -> None:
        """`order`: of the axes in memory."""
        size = math.prod(shape) * dtype.itemsize
        self.memory = torch.frombuffer(
            bytearray(rng.randbytes(size + 2 * GUARD_BYTES)), dtype=torch.uint8
        )
        self._inner = slice(GUARD_BYTES, GUARD_BYTES + size)
        held = self.memory[self._inner].view(dtype).view([shape[axis] for axis in order])
        self.tensor = held.permute([list(order).index(axis) for axis in range(len(shape))])

    def check_changed(self, before: torch.Tensor, blocks: Collection[int]) -> None:
        """Only these of the first axis may differ."""
        differs = before != self.memory
        inside = differs[self._inner].view(-1, self.tensor.element_size()).any(1)
        places = inside.as_strided(self.tensor.shape, self.tensor.stride())
        changed = {n for n in range(self.tensor.shape[0]) if bool(places[n].any())}
        differs[self._inner] = False
        if bool(differs.any()) or not changed <= set(blocks):
            raise FuzzFailure(f"bytes around the cache or of blocks {changed} have changed")


def _number(rng: random.Random, usual: int) -> int:
    return rng.choice(SMALL) if rng.random() < MUTATED else usual


def _range(rng: random.Random, usual: range) -> range:
    if rng.random() >= MUTATED:
        return usual
    return range(rng.choice(SMALL), rng.choice(SMALL), rng.choice((1, 1, 1, 2, -1)))


def _one_of(rng: random.Random, usual: T, others: Sequence[T]) -> T:
    return rng.choice(others) if rng.random() < MUTATED else usual


def _axes(rng: random.Random, *usual: int) -> list[int]:
    return [max(0, _number(rng, size)) for size in usual]


def _pages(rng: random.Random, nbytes: int) -> Pages:
    if rng.random() < MUTATED:
        nbytes += rng.choice(SMALL)
    cuts = [rng.randrange(max(1, nbytes)) for _ in range(rng.randrange(4))]
    return Pages(max(0, nbytes), cuts, rng.choice((0, 0, 1, 2)))


def _blocks_for(rng: random.Random, start: int, stop: int, size: int, blocks: int) -> list[int]:
    needed = -(-stop // size) - start // size if 0 <= start < stop else 0
    found = [rng.randrange(max(1, blocks)) for _ in range(min(needed, 8))]
    if rng.random() < MUTATED and found:
        found[rng.randrange(len(found))] = rng.choice((*INTEGERS, blocks, -blocks))
    return found[: -1 if rng.random() < 0.05 else None]


def _both_ways(
    save: Callable[[Sequence[memoryview]], int],
    load: Callable[[Sequence[memoryview]], int],
    pages: Pages,
    held: Sequence[_Guarded],
    blocks: Collection[int],
    outcomes: Counter[str],
) -> None:
    """Saves and loads. `blocks`: those of the tensors that a load may change."""
    ways: tuple[tuple[str, Callable[[Sequence[memoryview]], int], Collection[int]], ...]
    ways = (("save", save, ()), ("load", load, blocks))
    for name, copy, changed in ways:
        before = [one.memory.clone() for one in held]
        content = pages.content
        try:
            copy(pages.views)
        except PrfaasError:
            outcomes[f"{name} refused"] += 1
        else:
            outcomes[name] += 1
        for one, was in zip(held, before, strict=True):
            one.check_changed(was, changed)
        if not pages.guards_are_whole() or (name == "load" and pages.content != content):
            raise FuzzFailure(f"{name}: bytes around the pages have changed")


def _tokens(rng: random.Random, outcomes: Counter[str]) -> None:
    packing = rng.choice(PACKINGS)
    heads = 1 if packing == "mla" else rng.choice((1, 2, 4))
    own = _range(rng, range(heads) if rng.random() < 0.5 else range(heads // 2, heads))
    dim = rng.choice((8, 16))
    dims = _number(rng, dim), _number(rng, dim)
    ratio, blocks, tokens = rng.choice((1, 2)), rng.randint(1, 4), 16
    axes = _axes(rng, blocks * ratio, len(own) or 1, tokens, 2 * dim)
    if packing == "planes":
        axes = _axes(rng, blocks * ratio, 2, tokens, (len(own) or 1) * dim)
    if rng.random() < 0.1:
        axes = axes[: rng.randrange(1, 4)]
    order = list(range(len(axes)))
    if rng.random() < 0.5:
        rng.shuffle(order)
    wire = rng.choice(DTYPES[:3])
    stored = _one_of(rng, getattr(torch, wire), CACHE_DTYPES)
    if stored is torch.uint8:
        wire = _one_of(rng, wire, DTYPES)
    roles = ("latent", "rope") if packing == "mla" else ("keys", "values")
    roles = _one_of(rng, roles, (("keys", "values"), ("latent", "rope"), ("state", "conv")))
    shapes = [(dim,) if packing == "mla" else (_number(rng, heads), dim) for dim in dims]
    parts = [
        Part(role, _one_of(rng, shape, ((), (3,), (1, 2, 3))), _one_of(rng, wire, DTYPES))  # type: ignore[arg-type]
        for role, shape in zip(roles, shapes, strict=True)
    ]
    form = AttentionForm(
        _one_of(rng, packing, PACKINGS),
        (parts[0], parts[1]),
        own,
        rope_pairs=rng.random() < 0.1,
        scales=rng.choice((None, None, (0.5, 2.0), (0.0, math.nan), (-1.0, math.inf))),
        fp8=_one_of(rng, None, (torch.float8_e4m3fn, torch.float8_e5m2, torch.int64)),
    )
    cache = _Guarded(axes, stored, order, rng)
    number = _number(rng, blocks)
    try:
        block_rows(blocks_of(cache.tensor, number))
        outcomes["blocks as rows"] += 1
    except PrfaasError:
        outcomes["blocks as rows refused"] += 1
    try:
        converter = AttentionConverter(cache.tensor, number, form)
        size, row_bytes = converter.block_tokens, converter.row_bytes
    except PrfaasError:
        outcomes["form refused"] += 1
        return
    start = rng.randrange(3 * max(1, size))
    stop = start + rng.randrange(2 * max(1, size))
    start, stop = _number(rng, start), _number(rng, stop)
    ids = _blocks_for(rng, start, stop, size, number)
    pages = _pages(rng, max(0, stop - start) * row_bytes)
    ratio = axes[0] // number
    touched = {block * ratio + n for block in ids for n in range(ratio)}
    save = partial(converter.save, ids, start, stop)
    load = partial(converter.load, ids, start, stop)
    _both_ways(save, load, pages, [cache], touched, outcomes)


def _states(rng: random.Random, outcomes: Counter[str]) -> None:
    heads, k, v, columns = rng.choice((1, 2, 4)), 3, 5, rng.choice((0, 1, 3))
    own = _range(rng, range(heads) if rng.random() < 0.5 else range(heads // 2, heads))
    blocks, channels = rng.randint(1, 5), 12
    runs = (range(4), range(6, channels))
    held = tuple(_range(rng, run) for run in runs)
    share = ConvShare(held, (True, rng.random() < 0.5)[: rng.choice((2, 2, 2, 1))])
    wire, conv_wire = rng.choice(DTYPES[:3]), rng.choice(DTYPES[:3])
    parts = [Part("state", (_number(rng, heads), _number(rng, k * v)), _one_of(rng, wire, DTYPES))]
    if columns:
        shape = (_number(rng, channels), _number(rng, columns))
        parts.append(Part("conv", shape, _one_of(rng, conv_wire, DTYPES)))
    if rng.random() < 0.05:
        parts = parts[::-1] * rng.choice((0, 1, 2))
    first = rng.random() < 0.5
    local = sum(map(len, runs))
    axes = _axes(rng, blocks, len(own) or 1, k, v)
    if rng.random() < 0.1:
        axes = axes[: rng.randrange(1, 4)]
    ssm = _Guarded(
        axes, _one_of(rng, getattr(torch, wire), CACHE_DTYPES), list(range(len(axes))), rng
    )
    conv = None
    if columns:
        sizes = (local, columns) if first else (columns, local)
        conv = _Guarded(
            _axes(rng, blocks, *sizes),
            _one_of(rng, getattr(torch, conv_wire), CACHE_DTYPES),
            [0, 1, 2],
            rng,
        )
    form = StateForm(
        tuple(parts),
        own,
        _one_of(rng, share if columns else None, (share, None)),
        conv_channels_first=first,
        transposed=rng.random() < 0.3,
        relabelled=rng.random() < 0.2,
    )
    try:
        converter = StateConverter(conv.tensor if conv else None, ssm.tensor, form)
    except PrfaasError:
        outcomes["form refused"] += 1
        return
    block = rng.randrange(blocks)
    if rng.random() < MUTATED:
        block = rng.choice((*INTEGERS, blocks))
    tensors = [ssm] if conv is None else [ssm, conv]
    pages = _pages(rng, converter.state_bytes)
    save, load = partial(converter.save, block), partial(converter.load, block)
    _both_ways(save, load, pages, tensors, {block}, outcomes)
