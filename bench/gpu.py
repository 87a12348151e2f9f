"""Copies between a GPU and an arena, out and in, through the product's own code.

\b
    python -m prfaas_lab bench gpu [--device cuda] [--dtype bfloat16] [--small]

The arena is a real memfd, the page tables are those of real leases of a real pool, and the places
of segments are computed as an engine computes them. Each case is measured in a fresh arena, and in
one that was used: many short prefixes filled it, a random half of them was released, and the leases
that are measured get what is evicted.

\b
    segments    one layer's tokens, as the Hugging Face engine writes them: 4 KiB a token
    latent      the same, of the seven MLA layers of Kimi Linear, in a prompt of several chunks
    states      its linear states, 2 MiB a layer, kept after every chunk of that prompt
    latent1     the latents of short prompts, of one chunk each, one prompt after the other: what a
                prompt costs apart from its bytes
    states1     the states of these
    blocks16k   vLLM-shaped caches, 16-token blocks in random order, 16 KiB a block and layer
    blocks32k   the same with 32 KiB

A round takes from the launch of the first gather to the last byte in the pages, and from the first
copy out of the pages to the last row in the cache; the computation of addresses is included. Bytes
are compared in every case: in the pages after the way out, in the caches after the way in.

Needs 10 GB of the device's memory and no network. With `--device cpu --small` it runs with tiny
shapes on a CPU, to try the benchmark itself. Prints JSON with GB/s for each case. Exit code 1: a
case failed, or its bytes were not equal. A goal that is not met is not an error (`is_met`).
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol, TypeAlias

import click
import torch

from prfaas.cache.checkpoints import checkpoint_policy
from prfaas.cache.eviction import LRU
from prfaas.cache.groups import unit_bytes
from prfaas.cache.lease import Lease, LeaseId
from prfaas.cache.pool import HybridPrefixPool
from prfaas.cache.storage.arena import Arena, choose_layout
from prfaas.cache.storage.places import PageTable
from prfaas.cache.storage.tiers import PoolStorage
from prfaas.device import PagePins, StagingRing
from prfaas.display.console import print_json, run_benchmark
from prfaas.engine.hf.exporter import StagedWriter
from prfaas.errors import EngineError, PrfaasError
from prfaas.integrations.canonical import AttentionConverter, AttentionForm
from prfaas.integrations.canonical.row_batches import Piece, RowBatch, load, pieces, stage
from prfaas.kvd.engine_socket.leases import MappedArena, ReadLease, WriteLease
from prfaas.kvd.engine_socket.messages import Answer, Call, LeaseTicket, SegmentName, UnitPages
from prfaas.kvspec import GQA, MLA, KVSpec, Linear, LinearState, Segment, build_spec
from prfaas.kvspec.geometry import Geometry
from prfaas.kvspec.mapped import MappedRanges
from prfaas.kvspec.parts import layer_parts
from prfaas.types import BlockHash

WIRE_TOKENS = 64
BLOCK_TOKENS = 16
HEAD_DIM = 128
MOST_BLOCKS = 4  # of the prefixes that fill an arena
TIMEOUT_S = 60.0
STATE_DTYPE = "float32"

# Ends when its bytes are in the pages.
Writing: TypeAlias = "Future[Future[int]]"


@dataclass(frozen=True)
class Sizes:
    tokens: int  # of a request
    arena_bytes: int
    ring_bytes: int
    layers: int  # of vLLM's caches
    segment_layers: int
    requests: int  # of the hybrid model, with one chunk
    chunks: int  # of its long prompt
    linear: Linear
    mla: MLA
    rounds: int


def sizes_of(*, small: bool) -> Sizes:
    if small:
        return Sizes(
            tokens=512,
            arena_bytes=16 << 20,
            ring_bytes=4 << 20,
            layers=3,
            segment_layers=2,
            requests=2,
            chunks=2,
            linear=Linear((2, 3), 2, 2, 16, 16, 4),
            mla=MLA((0, 1), 32, 16),
            rounds=2,
        )
    return Sizes(
        tokens=8192,
        arena_bytes=4 << 30,
        ring_bytes=1 << 30,
        layers=60,
        segment_layers=24,
        requests=6,
        chunks=8,
        linear=Linear(tuple(range(7, 27)), 32, 32, 128, 128, 4),
        mla=MLA(tuple(range(7)), 512, 64),
        rounds=7,
    )


# The arena and its leases -------------------------------------------------------------------------


class LeasedPages:
    """An engine's leases on the same pages: one to write, one to read."""

    def __init__(self, mapped: MappedArena, table: PageTable, tokens: int) -> None:
        units = tuple(UnitPages(*key, tuple(pages)) for key, pages in table.items())
        ticket = LeaseTicket(1, tokens, 0, {}, (), units, units)
        self._table = table
        self._write = WriteLease(ticket, mapped, _NoKvd(), Future())
        self._read = ReadLease(ticket, mapped, _NoKvd())

    def buffers(self, segment: Segment) -> MappedRanges:
        """As an engine takes them: as numbers."""
        return self._write.mapped_buffers(segment)

    def sources(self, segment: Segment) -> MappedRanges:
        return self._read.mapped_views(segment)

    def views(self, segment: Segment) -> Sequence[memoryview]:
        return self._read.views(segment)

    def joint_buffers(self, segments: Sequence[Segment]) -> Sequence[memoryview]:
        return self._write.joint_buffers(segments)

    def joint_views(self, segments: Sequence[Segment]) -> Sequence[memoryview]:
        return self._read.joint_views(segments)

    def pages_per_run(self) -> float:
        pages = [page for key in sorted(self._table) for page in self._table[key]]
        runs = sum(page != last + 1 for last, page in zip([-2, *pages], pages, strict=False))
        return len(pages) / runs


class _Sink:
    """A lease without a kvd, as an engine's sink."""

    def __init__(self, lease: LeasedPages) -> None:
        self._lease = lease

    def buffers(self, segment: Segment) -> Sequence[memoryview]:
        return self._lease.buffers(segment).views()

    def mapped_buffers(self, segment: Segment) -> MappedRanges:
        return self._lease.buffers(segment)

    def ready(self, segment: Segment, heads: range | None = None) -> None:
        pass


class _NoKvd:
    """Leases of this process need no kvd until they end."""

    gone = False

    def call(self, call: Call) -> Answer:
        raise EngineError("there is no kvd")

    def ready(self, lease_id: int, segment: SegmentName) -> None:
        raise EngineError("there is no kvd")


class ArenaUse:
    """A pool over an arena, with prompts that share no prefix. States are kept every
    `chunk_tokens`."""

    def __init__(self, spec: KVSpec, arena: Arena, chunk_tokens: int) -> None:
        layout = choose_layout(unit_bytes(spec, WIRE_TOKENS))
        self._mapped = MappedArena(spec, WIRE_TOKENS, arena)
        self._pool = HybridPrefixPool(
            spec,
            WIRE_TOKENS,
            PoolStorage(layout, arena.pages, arena),
            eviction=LRU(),
            checkpoints=checkpoint_policy(f"every:{chunk_tokens // WIRE_TOKENS}", WIRE_TOKENS),
        )
        self._names = count()
        self._now = count()

    def lease(self, tokens: int) -> LeasedPages:
        lease = self._reserve(tokens)
        if lease is None:
            raise EngineError("the arena is too small for the leases that are measured")
        return LeasedPages(self._mapped, self._pool.tables(lease).writable, tokens)

    def fragment(self) -> None:
        """Fills the arena with short prefixes, and releases a random half of them."""
        choose = random.Random(1)
        held: list[LeaseId] = []
        most = MOST_BLOCKS
        while most:
            blocks = choose.randint(1, most)
            lease = self._reserve(blocks * WIRE_TOKENS)
            if lease is None:
                most = blocks - 1  # the last prefixes fill what is left
                continue
            self._pool.commit(lease, float(next(self._now)))
            held.append(lease)
        choose.shuffle(held)
        for lease in held[: len(held) // 2]:
            self._pool.release(lease, float(next(self._now)))

    def _reserve(self, tokens: int) -> LeaseId | None:
        blocks = tokens // WIRE_TOKENS
        hashes = [BlockHash(next(self._names).to_bytes(8, "big")) for _ in range(blocks)]
        lease = self._pool.reserve(hashes, tokens, now=float(next(self._now)))
        return lease.id if isinstance(lease, Lease) else None


class ArenaFile:
    """One memfd for all cases. Its memory is allocated at once, as that of a kvd that has run for a
    while; each case maps it anew, with pages of its own size."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._fd = os.memfd_create("prfaas-bench")
        os.ftruncate(self._fd, nbytes)
        whole = Arena(self._fd, nbytes, 1)
        view = whole.view(0, nbytes)
        torch.frombuffer(view, dtype=torch.uint8).fill_(1)
        view.release()

    def arena(self, spec: KVSpec) -> Arena:
        page_bytes = choose_layout(unit_bytes(spec, WIRE_TOKENS)).page_bytes
        return Arena(self._fd, page_bytes, self.nbytes // page_bytes)

    def close(self) -> None:
        os.close(self._fd)


# What is copied -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Threads:
    """As a worker has them: one queues copies into the pages, one waits for the device."""

    queueing: ThreadPoolExecutor
    waiting: ThreadPoolExecutor

    def write(self, begin: Callable[[], Callable[[], int]]) -> Writing:
        return self.queueing.submit(lambda: self.waiting.submit(begin()))


class Copied(Protocol):
    """State on a device, and the leases that it is copied to."""

    nbytes: int

    def save(self, leases: Sequence[LeasedPages], threads: Threads) -> list[Writing]: ...

    def load(self, leases: Sequence[LeasedPages]) -> None:
        """Queues the loads."""

    def views(self, leases: Sequence[LeasedPages]) -> Iterator[Sequence[memoryview]]:
        """Of one call that copies after the other."""

    def erase(self) -> None: ...

    def is_in_pages(self, leases: Sequence[LeasedPages]) -> bool:
        """Of a sample."""

    def is_restored(self) -> bool: ...


class Segments:
    """Rows of some layers, in one tensor for each segment, chunk by chunk."""

    def __init__(self, ring: StagingRing, segments: Sequence[Segment],
                 row_bytes: int, rows: int, requests: int) -> None:  # fmt: skip
        self._ring = ring
        self._rows = rows
        self._segments = segments
        self._tensors = [
            [_random_bytes(rows * row_bytes, ring.device) for _ in segments]
            for _ in range(requests)
        ]
        self._before = [[tensor.clone() for tensor in some] for some in self._tensors]
        self.nbytes = requests * len(segments) * rows * row_bytes

    def _parts(
        self, leases: Sequence[LeasedPages]
    ) -> Iterator[tuple[LeasedPages, Segment, torch.Tensor]]:
        for lease, tensors in zip(leases, self._tensors, strict=True):
            for segment, tensor in zip(self._segments, tensors, strict=True):
                yield lease, segment, tensor

    def save(self, leases: Sequence[LeasedPages], threads: Threads) -> list[Writing]:
        """As an engine exports one prompt after the other."""
        for lease, tensors in zip(leases, self._tensors, strict=True):
            writer = StagedWriter(_Sink(lease), self._ring)
            try:
                for segment, tensor in zip(self._segments, tensors, strict=True):
                    writer.write(segment, (tensor.view(self._rows, -1),))
                writer.finish()
            except BaseException:
                writer.abort()
                raise
        return []

    def load(self, leases: Sequence[LeasedPages]) -> None:
        self._ring.copy_to(
            (tensor, lease.sources(segment)) for lease, segment, tensor in self._parts(leases)
        )

    def views(self, leases: Sequence[LeasedPages]) -> Iterator[Sequence[memoryview]]:
        return (lease.views(segment) for lease, segment, _ in self._parts(leases))

    def erase(self) -> None:
        for tensors in self._tensors:
            for tensor in tensors:
                tensor.zero_()

    def is_in_pages(self, leases: Sequence[LeasedPages]) -> bool:
        parts = list(self._parts(leases))
        return all(
            b"".join(lease.views(segment)) == tensor.cpu().numpy().tobytes()
            for lease, segment, tensor in (parts[0], parts[len(parts) // 2], parts[-1])
        )

    def is_restored(self) -> bool:
        return all(
            torch.equal(tensor, before)
            for some, others in zip(self._tensors, self._before, strict=True)
            for tensor, before in zip(some, others, strict=True)
        )


class Blocks:
    """vLLM-shaped caches of all layers, whose blocks are in random order."""

    def __init__(self, ring: StagingRing, geometry: GQA, dtype: str, tokens: int) -> None:
        blocks = tokens // BLOCK_TOKENS
        parts = layer_parts(geometry, kv_dtype=dtype, state_dtype=STATE_DTYPE)
        heads = geometry.kv_heads
        self._ring = ring
        self._tokens = tokens
        self._layers = geometry.layers
        self._form = AttentionForm("content", (parts[0], parts[1]), range(heads))
        shape = (2 * blocks, BLOCK_TOKENS, heads, 2 * HEAD_DIM)
        kind: torch.dtype = getattr(torch, dtype)
        self._caches = [
            torch.randn(shape, device=ring.device, dtype=kind).transpose(1, 2) for _ in self._layers
        ]
        self._blocks = 2 * blocks
        converters = [AttentionConverter(c, self._blocks, self._form, ring) for c in self._caches]
        self._row_bytes = converters[0].row_bytes
        choose = random.Random(2)
        self._ids = choose.sample(range(1, 2 * blocks), blocks)  # block 0 is vLLM's null block
        self._batch = RowBatch([c.rows for c in converters], self._ids, 0, tokens, WIRE_TOKENS)
        self._chosen = torch.tensor(sorted(self._ids), device=ring.device)
        self._before = [cache[self._chosen].clone() for cache in self._caches]
        self.nbytes = len(self._layers) * tokens * self._row_bytes

    def save(self, leases: Sequence[LeasedPages], threads: Threads) -> list[Writing]:
        return [
            self._write(staged.piece, lease, staged.begin, staged.end, threads)
            for lease in leases
            for staged in stage(self._ring, self._batch)
        ]

    def _write(
        self,
        piece: Piece,
        lease: LeasedPages,
        begin: Callable[[Sequence[memoryview]], None],
        end: Callable[[], int],
        threads: Threads,
    ) -> Writing:
        def begin_write() -> Callable[[], int]:
            begin(lease.joint_buffers(self._segments(piece)))
            return end

        return threads.write(begin_write)

    def load(self, leases: Sequence[LeasedPages]) -> None:
        for lease in leases:

            def pages(piece: Piece, lease: LeasedPages = lease) -> Sequence[memoryview]:
                return lease.joint_views(self._segments(piece))

            load(self._ring, self._batch, pages)

    def views(self, leases: Sequence[LeasedPages]) -> Iterator[Sequence[memoryview]]:
        return (
            lease.joint_views(self._segments(piece))
            for lease in leases
            for piece in pieces(self._batch, self._ring.chunk_bytes)
        )

    def erase(self) -> None:
        for cache in self._caches:
            cache.zero_()

    def is_in_pages(self, leases: Sequence[LeasedPages]) -> bool:
        """Compared with the path of the CPU."""
        for position in sorted({0, len(self._layers) // 2, len(self._layers) - 1}):
            judge = AttentionConverter(self._caches[position].cpu(), self._blocks, self._form)
            expected = bytearray(self._tokens * self._row_bytes)
            judge.save(self._ids, 0, self._tokens, [memoryview(expected)])
            segment = Segment("full0", self._layers[position], 0, self._tokens)
            if any(b"".join(lease.views(segment)) != expected for lease in leases):
                return False
        return True

    def is_restored(self) -> bool:
        return all(
            torch.equal(cache[self._chosen], before)
            for cache, before in zip(self._caches, self._before, strict=True)
        )

    def _segments(self, piece: Piece) -> list[Segment]:
        tokens = piece.tokens
        return [Segment("full0", self._layers[n], tokens.start, tokens.stop) for n in piece.layers]


# Measuring ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    name: str
    geometries: tuple[Geometry, ...]
    requests: int
    chunks: int
    goal_GBps: float | None
    make: Callable[[StagingRing, KVSpec], Copied]


def cases(sizes: Sizes, dtype: str) -> list[Case]:
    element = getattr(torch, dtype).itemsize
    numbers = tuple(range(sizes.layers))

    def attention(bytes_per_token: int, layers: Sequence[int]) -> GQA:
        heads = bytes_per_token // (2 * HEAD_DIM * element)
        return GQA(tuple(layers), heads, HEAD_DIM, HEAD_DIM)

    def of_tokens(ring: StagingRing, spec: KVSpec, requests: int, chunks: int) -> Copied:
        group, rows = spec["full0"], sizes.tokens
        assert not isinstance(group, LinearState)
        segments = [
            Segment("full0", layer, chunk * rows, (chunk + 1) * rows)
            for chunk in range(chunks)
            for layer in group.layers
        ]
        return Segments(ring, segments, group.bytes_per_token, rows, requests)

    def of_states(ring: StagingRing, spec: KVSpec, requests: int, chunks: int) -> Copied:
        group = spec["linear0"]
        assert isinstance(group, LinearState)
        segments = [
            Segment("linear0", layer, 0, (chunk + 1) * sizes.tokens)
            for chunk in range(chunks)
            for layer in group.layers
        ]
        return Segments(ring, segments, group.state_bytes, 1, requests)

    def of_blocks(geometry: GQA) -> Callable[[StagingRing, KVSpec], Copied]:
        return lambda ring, _: Blocks(ring, geometry, dtype, sizes.tokens)

    dense = attention(4096, range(sizes.segment_layers))
    hybrid = (sizes.mla, sizes.linear)
    small, large = (attention(kib << 10, numbers) for kib in (1, 2))
    every, chunks = sizes.requests, sizes.chunks
    return [
        Case("segments", (dense,), 1, 1, 40.0, lambda r, spec: of_tokens(r, spec, 1, 1)),
        Case("latent", hybrid, 1, chunks, 40.0, lambda r, spec: of_tokens(r, spec, 1, chunks)),
        Case("states", hybrid, 1, chunks, 40.0, lambda r, spec: of_states(r, spec, 1, chunks)),
        Case("latent1", hybrid, every, 1, None, lambda r, spec: of_tokens(r, spec, every, 1)),
        Case("states1", hybrid, every, 1, None, lambda r, spec: of_states(r, spec, every, 1)),
        Case("blocks16k", (small,), 1, 1, 30.0, of_blocks(small)),
        Case("blocks32k", (large,), 1, 1, 30.0, of_blocks(large)),
    ]


def measure(device: str, dtype: str, *, small: bool) -> dict[str, Any]:
    """GB/s out and in for each case, in a fresh and in a fragmented arena."""
    started = time.perf_counter()
    sizes = sizes_of(small=small)
    file = ArenaFile(sizes.arena_bytes)
    found: list[dict[str, Any]] = []
    try:
        for case in cases(sizes, dtype):
            click.echo(f"{case.name} begins", err=True)
            try:
                found += _case(case, sizes, device, dtype, file)
            except (
                PrfaasError,
                RuntimeError,
                TimeoutError,
            ) as error:  # other cases are still of interest
                found.append({"case": case.name, "exact": False, "error": repr(error)[:300]})
            if _is_cuda(device):
                torch.cuda.empty_cache()
    finally:
        file.close()
    return {
        "device": torch.cuda.get_device_name(device) if _is_cuda(device) else device,
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "dtype": dtype,
        "arena_GB": round(sizes.arena_bytes / 1e9, 3),
        "tokens": sizes.tokens,
        "unit_tokens": WIRE_TOKENS,
        "cases": found,
        "took_s": round(time.perf_counter() - started, 1),
    }


def _case(
    case: Case, sizes: Sizes, device: str, dtype: str, file: ArenaFile
) -> list[dict[str, Any]]:
    spec = build_spec(case.geometries, kv_dtype=dtype, state_dtype=STATE_DTYPE)
    arena = file.arena(spec)
    found: list[dict[str, Any]] = []
    with _ring(device, sizes.ring_bytes) as ring, _threads() as threads:
        copied = case.make(ring, spec)
        for name in ("fresh", "fragmented"):
            use = ArenaUse(spec, arena, sizes.tokens)
            if name == "fragmented":
                use.fragment()
            leases = [use.lease(case.chunks * sizes.tokens) for _ in range(case.requests)]
            result: dict[str, Any] = {"case": case.name, "arena": name}
            result |= _rates(copied, leases, ring, threads, sizes.rounds)
            result["pages_per_run"] = round(
                statistics.mean(lease.pages_per_run() for lease in leases), 1
            )
            if _is_cuda(device) and case.goal_GBps is not None:
                slower = min(result["out_GBps"], result["in_GBps"])
                result |= {"goal_GBps": case.goal_GBps, "is_met": slower >= case.goal_GBps}
            found.append(result)
    return found


def _rates(
    copied: Copied,
    leases: Sequence[LeasedPages],
    ring: StagingRing,
    threads: Threads,
    rounds: int,
) -> dict[str, Any]:
    def save() -> None:
        for writing in copied.save(leases, threads):
            writing.result(TIMEOUT_S).result(TIMEOUT_S)

    def back() -> None:
        ring.fence()
        copied.load(leases)
        ring.finish_loads()

    _timed(save, ring)  # also registers the pages and compiles the kernels
    is_exact = copied.is_in_pages(leases)
    copied.erase()
    _timed(back, ring)
    is_exact = is_exact and copied.is_restored()
    gigabytes = copied.nbytes / 1e9
    out_s = [_timed(save, ring) for _ in range(rounds + 1)][1:]
    in_s = [_timed(back, ring) for _ in range(rounds + 1)][1:]
    sizes = [view.nbytes for views in copied.views(leases) for view in views]
    return {
        "GB": round(gigabytes, 4),
        "out_GBps": round(gigabytes / statistics.median(out_s), 2),
        "in_GBps": round(gigabytes / statistics.median(in_s), 2),
        "best_out_GBps": round(gigabytes / min(out_s), 2),
        "best_in_GBps": round(gigabytes / min(in_s), 2),
        "bytes_per_copy": round(statistics.mean(sizes)),
        "exact": is_exact and copied.is_restored(),
    }


def _timed(work: Callable[[], None], ring: StagingRing) -> float:
    """Seconds from an idle device to an idle device."""
    _synchronize(ring.device)
    started = time.perf_counter()
    work()
    _synchronize(ring.device)
    return time.perf_counter() - started


@contextmanager
def _ring(device: str, ring_bytes: int) -> Iterator[StagingRing]:
    pins = PagePins(device) if _is_cuda(device) else None
    ring = StagingRing(device, ring_bytes=ring_bytes, pins=pins, timeout_s=TIMEOUT_S)
    try:
        yield ring
    finally:
        ring.close()  # before the arena is unmapped


@contextmanager
def _threads() -> Iterator[Threads]:
    with ThreadPoolExecutor(1) as queueing, ThreadPoolExecutor(1) as waiting:
        yield Threads(queueing, waiting)


def _random_bytes(nbytes: int, device: torch.device) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device=device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _is_cuda(device: str) -> bool:
    return torch.device(device).type == "cuda"


@click.command(help=__doc__)
@click.option("--device", default="cuda", show_default=True, help="Torch device.")
@click.option(
    "--dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Type of the caches.",
)
@click.option("--small", is_flag=True, help="Tiny shapes.")
def main(device: str, dtype: str, small: bool) -> None:
    found = measure(device, dtype, small=small)
    print_json(found)
    sys.exit(0 if all(case["exact"] for case in found["cases"]) else 1)


if __name__ == "__main__":
    run_benchmark(main)
