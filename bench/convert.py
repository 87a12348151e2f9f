"""The rate at which caches are converted to the canonical form and back.

    python -m prfaas_lab bench convert [--seconds 0.5] [--cpu-only] [--gpu-only] [--gpu-tokens 8192]

CPU: save and load of one layer of 4,096 tokens (8 heads of 128 dims) in each packing, beside a
plain copy of as many bytes. GPU, where there is one: caches shaped like vLLM's, in 16-token blocks
in random order, of 60 attention layers (both layouts), 60 MLA layers and 48 delta-net layers:

    save           gather on the device, and copy out into the pages of an arena
    load           copy in from the pages, and scatter
    beside         the slow-down of matmuls of 8192^3, one per layer, while the copies run

and the same with the connector's worker itself, which also copies whole blocks (the native form).

Everything is checked against the path of the CPU before it is measured. The result is JSON; rates
are GB/s of canonical bytes, best of the rounds; on a CPU also per second of CPU time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from prfaas.device import PagePins, StagingRing
from prfaas.errors import PrfaasError
from prfaas.integrations.canonical import (
    AttentionConverter,
    AttentionForm,
    Packing,
    StateConverter,
    StateForm,
    delta_rule_share,
    mamba2_share,
)
from prfaas.integrations.canonical.row_batches import (
    Piece,
    RowBatch,
    StagedPiece,
    load,
    stage,
)
from prfaas.integrations.canonical.row_moves import LayerRows
from prfaas.kvspec import Linear
from prfaas.kvspec.parts import Part, layer_parts

WIRE_TOKENS = 64
ARENA_BYTES_PER_TOKEN = 60 * 4096  # of the largest case
TIMEOUT_S = 60.0


class Arena:
    """Pages as a kvd lays them out: blocks of tokens, and all layers in a block."""

    def __init__(self, memory: memoryview, layers: int, piece_bytes: int, pieces: int) -> None:
        self._memory = memory
        self._layers, self._piece_bytes, self._pieces = layers, piece_bytes, pieces

        # In any order, as a kvd that has run for a while gives them out.
        self._units = torch.randperm(pieces).tolist()

    def buffers(self, layer: int) -> list[memoryview]:
        return self.runs(range(layer, layer + 1), 0, self._pieces)

    def runs(self, layers: range, first: int, last: int) -> list[memoryview]:
        """Pieces of neighbouring layers in units [first, last), unit by unit."""
        size = self._piece_bytes
        starts = [(unit * self._layers + layers.start) * size for unit in self._units[first:last]]
        return [self._memory[start : start + len(layers) * size] for start in starts]


def arena_memory(nbytes: int) -> memoryview:
    """Shared memory that is allocated already, as a kvd's is."""
    region = mmap.mmap(-1, nbytes)
    view = memoryview(region)
    torch.frombuffer(view, dtype=torch.uint8).fill_(1)
    return view


def best_s(
    work: Callable[[], object],
    seconds: float,
    rounds: int = 3,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """The shortest time of at least `rounds` runs, which take about `seconds` in all."""
    work()
    times: list[float] = []
    while len(times) < rounds or (sum(times) < seconds and len(times) < 50):
        started = clock()
        work()
        times.append(clock() - started)
    return min(times)


# CPU ----------------------------------------------------------------------------------------------

# Packing, data type, tokens in a block.
CPU_CASES: list[tuple[Packing, str, int]] = [
    ("cpu_vec", "float32", 128),
    ("cpu_vec", "bfloat16", 128),
    ("cpu_amx", "bfloat16", 128),
    ("cpu_bfmmla", "bfloat16", 128),
    ("content", "bfloat16", 16),
    ("content", "bfloat16", 128),
    ("mla", "bfloat16", 64),
]
CPU_TOKENS, CPU_LAYERS = 4_096, 4


def attention_parts(packing: Packing, heads: int, dtype: str) -> tuple[Part, Part]:
    if packing == "mla":
        return Part("latent", (512,), dtype), Part("rope", (64,), dtype)
    return Part("keys", (heads, 128), dtype), Part("values", (heads, 128), dtype)


def attention_cache(
    packing: Packing, blocks: int, heads: int, tokens: int, dtype: str, order: str, device: str
) -> torch.Tensor:
    slots, content = (1, 576) if packing == "mla" else (heads, 256)
    sizes = (blocks, slots, tokens, content)
    if order == "NHD":
        sizes = (blocks, tokens, slots, content)
    kind: torch.dtype = getattr(torch, dtype)
    cache = torch.randn(sizes, device=device, dtype=torch.float32 if device == "cpu" else kind)
    cache = cache.to(kind)
    return cache.transpose(1, 2) if order == "NHD" else cache


def cpu_case(packing: Packing, dtype: str, block: int, seconds: float) -> dict[str, Any]:
    heads = 1 if packing == "mla" else 8
    count = CPU_TOKENS // block
    cache = attention_cache(packing, 2 * count, heads, block, dtype, "HND", "cpu")
    ids = (torch.randperm(2 * count - 1)[:count] + 1).tolist()
    form = AttentionForm(packing, attention_parts(packing, heads, dtype), range(heads))
    converter = AttentionConverter(cache, 2 * count, form)
    piece, pieces = WIRE_TOKENS * converter.row_bytes, CPU_TOKENS // WIRE_TOKENS
    memory = arena_memory(CPU_LAYERS * piece * pieces)
    buffers = Arena(memory, CPU_LAYERS, piece, pieces).buffers(1)
    gigabytes = CPU_TOKENS * converter.row_bytes / 1e9
    target, source = (torch.ones(piece * pieces, dtype=torch.uint8) for _ in range(2))
    result: dict[str, Any] = {"packing": packing, "dtype": dtype, "block_tokens": block}
    works: dict[str, Callable[[], object]] = {
        "save": lambda: converter.save(ids, 0, CPU_TOKENS, buffers),
        "load": lambda: converter.load(ids, 0, CPU_TOKENS, buffers),
        "memcpy": lambda: target.copy_(source),
    }
    for name, work in works.items():
        result[f"{name}_GBps"] = rate(gigabytes, best_s(work, seconds))
        # What a core does, also on a machine that others share.
        cpu_s = best_s(work, seconds, clock=time.process_time)
        result[f"{name}_GB_per_cpu_s"] = rate(gigabytes, cpu_s)
    return result


def rate(gigabytes: float, took_s: float) -> float:
    return round(gigabytes / took_s, 2)


# GPU ----------------------------------------------------------------------------------------------


@dataclass
class GpuCase:
    """Layers of one kind, and the pages of all of them."""

    name: str
    ring: StagingRing
    nbytes: int  # canonical, of all layers and moves
    layers: int
    moves: list[GpuMove]
    check: Callable[[], bool]


@dataclass
class GpuMove:
    """Blocks of one request, in all layers."""

    rows: Sequence[LayerRows]
    block_ids: list[int]
    stop: int  # in tokens, or one state
    unit: int  # tokens in a unit of the arena
    arena: Arena

    def batch(self, first: int, last: int) -> RowBatch:
        return RowBatch(self.rows[first:last], self.block_ids, 0, self.stop, self.unit)

    def pages(self, first: int, piece: Piece) -> list[memoryview]:
        """Of a piece of a batch that begins with layer `first`."""
        layers = range(first + piece.layers.start, first + piece.layers.stop)
        tokens = piece.tokens
        return self.arena.runs(layers, tokens.start // self.unit, -(-tokens.stop // self.unit))


def attention_case(
    name: str, packing: Packing, order: str, layers: int, tokens: int, ring: StagingRing,
    memory: memoryview, heads: range = range(8), rope_pairs: bool = False,
) -> GpuCase:  # fmt: skip
    """`heads`: those of 8 that this rank has."""
    total = 1 if packing == "mla" else 8
    heads = range(1) if packing == "mla" else heads
    count = tokens // 16
    form = AttentionForm(packing, attention_parts(packing, total, "bfloat16"), heads, rope_pairs)
    caches = [
        attention_cache(packing, 2 * count, len(heads), 16, "bfloat16", order, "cuda")
        for _ in range(layers)
    ]
    converters = [AttentionConverter(cache, 2 * count, form, ring) for cache in caches]
    ids = (torch.randperm(2 * count - 1)[:count] + 1).tolist()
    row = converters[0].row_bytes
    arena = Arena(memory, layers, WIRE_TOKENS * row, tokens // WIRE_TOKENS)
    rows = [converter.rows for converter in converters]
    moves = [GpuMove(rows, ids, tokens, WIRE_TOKENS, arena)]

    def check() -> bool:
        """Of all layers at once; then awkward lengths of one, compared with the CPU's path."""
        before = [cache[ids].clone() for cache in caches]
        case_pages = [arena.runs(range(n, n + 1), 0, tokens // WIRE_TOKENS) for n in range(layers)]
        save_all(case, None)
        for layer in (0, 1, layers - 1):
            judge = AttentionConverter(caches[layer].cpu(), 2 * count, form)
            expected = bytearray(tokens * row)
            judge.save(ids, 0, tokens, [memoryview(expected)])
            found = b"".join(case_pages[layer])
            own = converters[layer].rows.shape.places
            if any(_columns(found, row, place) != _columns(expected, row, place) for place in own):
                return False
        for cache in caches:
            cache.fill_(float("nan"))
        ring.fence()
        load_all(case)
        is_same = all(torch.equal(c[ids], b) for c, b in zip(caches, before, strict=True))
        start, stop = 21, tokens - 27
        some = ids[1 : -(-stop // 16)]
        pages = [memoryview(bytearray((stop - start) * row))]
        converters[1].save(some, start, stop, pages)
        caches[1].fill_(float("nan"))
        converters[1].load(some, start, stop, pages)
        twin = torch.full_like(caches[1], float("nan")).cpu()
        AttentionConverter(twin, 2 * count, form).load(some, start, stop, pages)
        is_same &= torch.equal(caches[1][some].cpu(), twin[some])
        caches[1].zero_()
        return is_same

    own_bytes = converters[0].rows.shape.nbytes
    case = GpuCase(name, ring, layers * tokens * own_bytes, layers, moves, check)
    return case


def _columns(rows: bytes | bytearray, row_bytes: int, place: range) -> bytes:
    whole = torch.frombuffer(bytearray(rows), dtype=torch.uint8).view(-1, row_bytes)
    return bytes(whole[:, place.start : place.stop].contiguous().numpy().tobytes())


def state_case(
    name: str, linear: Linear, layers: int, requests: int, ring: StagingRing, memory: memoryview,
    *, delta_rule: bool,
) -> GpuCase:  # fmt: skip
    """States in float32, histories in bfloat16."""
    heads, k_dim, v_dim = linear.v_heads, linear.k_dim, linear.v_dim
    parts = layer_parts(linear, kv_dtype="bfloat16", state_dtype="float32")
    channels = parts[1].shape[0]
    share = delta_rule_share(linear, 0, 1) if delta_rule else mamba2_share(linear, 0, 1)
    form = StateForm(parts, range(heads), share, transposed=delta_rule)
    tensors = [
        (
            torch.randn(2 * requests, 3, channels, device="cuda", dtype=torch.bfloat16),
            torch.randn(2 * requests, heads, v_dim, k_dim, device="cuda"),
        )
        for _ in range(layers)
    ]
    converters = [StateConverter(conv, ssm, form, ring) for conv, ssm in tensors]
    size = converters[0].state_bytes
    rows = [converter.rows_written for converter in converters]
    unit = layers * size
    requests = min(requests, ring.chunk_bytes * 8 // unit)  # more wait for staging
    blocks = (torch.randperm(2 * requests - 1)[:requests] + 1).tolist()
    arenas = [Arena(memory[n * unit : (n + 1) * unit], layers, size, 1) for n in range(requests)]
    moves = [
        GpuMove(rows, [block], 1, 1, arena) for block, arena in zip(blocks, arenas, strict=True)
    ]

    def check() -> bool:
        conv, ssm = tensors[1]
        before = conv.clone(), ssm.clone()
        twin = StateConverter(conv.cpu(), ssm.cpu(), form)
        expected = bytearray(size)
        save_all(case, None)
        for block, arena in zip(blocks, arenas, strict=True):
            twin.save(block, [memoryview(expected)])
            if b"".join(arena.runs(range(1, 2), 0, 1)) != bytes(expected):
                return False
        for some in tensors:
            for tensor in some:
                tensor.fill_(float("nan"))
        ring.fence()
        load_all(case)
        is_same = torch.equal(conv[blocks], before[0][blocks])
        return is_same and torch.equal(ssm[blocks], before[1][blocks])

    case = GpuCase(name, ring, layers * requests * size, layers, moves, check)
    return case


def stage_layers(
    case: GpuCase, first: int, last: int
) -> Iterator[tuple[StagedPiece, Callable[[Piece], list[memoryview]]]]:
    """Queues the gathers of some layers. The pieces, and the function for their pages."""
    for move in case.moves:
        for staged in stage(case.ring, move.batch(first, last)):
            yield staged, partial(move.pages, first)


def layers_at_once(case: GpuCase) -> int:
    """As many as a worker collects before it launches a gather. States have no hook: all."""
    if case.moves[0].stop == 1:
        return case.layers
    return max(1, case.ring.chunk_bytes * case.layers // case.nbytes)


@dataclass
class Threads:
    """As a worker has them: one queues copies into the pages, one waits for the device."""

    queueing: ThreadPoolExecutor
    waiting: ThreadPoolExecutor

    def finish(self, staged: StagedPiece, pages: Callable[[Piece], list[memoryview]]) -> Any:
        def begin() -> Any:
            staged.begin(pages(staged.piece))
            return self.waiting.submit(staged.end)

        return self.queueing.submit(begin)


def save_all(
    case: GpuCase, threads: Threads | None, each: Callable[[], None] | None = None
) -> list[Any]:
    """Layer after layer, as a model runs; threads put what has arrived into the pages. `each` is
    called for every layer, before its gather."""
    waiting: list[Any] = []
    at_once = layers_at_once(case)
    for layer in range(case.layers):
        if each is not None:
            each()
        if (layer + 1) % at_once and layer + 1 != case.layers:
            continue
        for staged, pages in stage_layers(case, layer // at_once * at_once, layer + 1):
            if threads is None:
                staged.finish(pages(staged.piece))
            else:
                waiting.append(threads.finish(staged, pages))
    return waiting


def wait_for(waiting: Sequence[Any]) -> None:
    for future in waiting:
        future.result(TIMEOUT_S).result(TIMEOUT_S)


def load_all(case: GpuCase) -> None:
    for move in case.moves:
        load(case.ring, move.batch(0, case.layers), partial(move.pages, 0))
    case.ring.finish_loads()


def beside(case: GpuCase, threads: Threads, rounds: int = 9) -> dict[str, float]:
    """Seconds of matmuls with and without copies; the copies take less time than the matmuls.
    Medians of rounds that take turns, because clocks change with heat."""
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(factor)

    def multiply() -> None:
        torch.matmul(factor, factor, out=out)

    def alone() -> None:
        for _ in range(case.layers):
            multiply()

    saves: list[Any] = []
    loads: list[Any] = []

    def saving() -> None:
        saves.extend(save_all(case, threads, multiply))

    def loading() -> None:
        case.ring.fence()
        loads.append(threads.waiting.submit(load_all, case))
        alone()

    def end() -> None:
        """The last copies may end later than the compute stream, whose time alone counts."""
        wait_for(saves)
        for one in loads:
            one.result(TIMEOUT_S)
        saves.clear()
        loads.clear()

    alone_s, saving_s, loading_s = turns_s([alone, saving, loading], end, rounds)
    return {
        "matmuls_ms": round(alone_s * 1e3, 2),
        "while_saving_ms": round(saving_s * 1e3, 2),
        "while_loading_ms": round(loading_s * 1e3, 2),
        "saving_costs": round(saving_s / alone_s - 1, 4),
        "loading_costs": round(loading_s / alone_s - 1, 4),
    }


def turns_s(
    works: Sequence[Callable[[], None]], end: Callable[[], None], rounds: int
) -> list[float]:
    """For each work the median time until the current stream has done it."""
    times: list[list[float]] = [[] for _ in works]
    for turn in range(rounds + 1):
        for work, found in zip(works, times, strict=True):
            torch.cuda.synchronize()
            time.sleep(0.05)  # each begins with a device that is equally cool
            started = time.perf_counter()
            work()
            torch.cuda.current_stream().synchronize()
            if turn:  # the first one warms up
                found.append(time.perf_counter() - started)
            end()
    return [statistics.median(found) for found in times]


def gpu_case(case: GpuCase, seconds: float) -> dict[str, Any]:
    gigabytes = case.nbytes / 1e9
    result: dict[str, Any] = {
        "case": case.name,
        "GB": round(gigabytes, 3),
        "exact": case.check(),
    }
    with ThreadPoolExecutor(1) as queueing, ThreadPoolExecutor(1) as waiting:
        threads = Threads(queueing, waiting)
        took_s = best_s(lambda: wait_for(save_all(case, threads)), seconds)
        result["save_GBps"] = rate(gigabytes, took_s)
        result["load_GBps"] = rate(gigabytes, best_s(lambda: load_all(case), seconds))
        result["beside"] = beside(case, threads)
    return result


def plain_copies(seconds: float) -> dict[str, float]:
    """What the bus gives: 256 MiB of pinned memory in one copy."""
    device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)

    def out() -> None:
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()

    def back() -> None:
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()

    gigabytes = (1 << 28) / 1e9
    return {
        "to_host_GBps": rate(gigabytes, best_s(out, seconds)),
        "to_device_GBps": rate(gigabytes, best_s(back, seconds)),
    }


def gpu_cases(tokens: int, seconds: float) -> list[dict[str, Any]]:
    memory = arena_memory(ARENA_BYTES_PER_TOKEN * tokens)
    found: list[dict[str, Any]] = []
    requests = min(8, tokens // 1024)
    ring = StagingRing("cuda", pins=PagePins("cuda"), timeout_s=TIMEOUT_S)
    unpinned = StagingRing("cuda", timeout_s=TIMEOUT_S)
    # Qwen3-Next's delta nets, Kimi Linear's, and the Mamba-2 layers of Falcon-H1 34B.
    gated = Linear((0,), 16, 32, 128, 128, 4)
    kda = Linear((0,), 32, 32, 128, 128, 4)
    mamba = Linear((0,), 2, 32, 256, 128, 4)
    makers: list[Callable[[], GpuCase]] = [
        partial(attention_case, "NHD", "content", "NHD", 60, tokens, ring, memory),
        partial(attention_case, "HND", "content", "HND", 60, tokens, ring, memory),
        partial(attention_case, "NHD, 2 of 8 heads", "content", "NHD", 60, tokens, ring, memory,
                range(2, 4)),
        partial(attention_case, "MLA", "mla", "HND", 60, tokens, ring, memory),
        partial(attention_case, "MLA, rope in pairs", "mla", "HND", 60, tokens, ring, memory,
                rope_pairs=True),
        partial(state_case, "gated delta net", gated, 48, requests, ring, memory, delta_rule=True),
        partial(state_case, "KDA", kda, 48, requests, ring, memory, delta_rule=True),
        partial(state_case, "Mamba-2", mamba, 48, requests, ring, memory, delta_rule=False),
        partial(attention_case, "NHD, unregistered", "content", "NHD", 60, tokens, unpinned,
                memory),
    ]  # fmt: skip
    for make in makers:
        try:
            found.append(gpu_case(make(), seconds))
        except (PrfaasError, RuntimeError) as error:  # other cases are still of interest
            found.append({"error": repr(error)[:300]})
        torch.cuda.empty_cache()
    ring.close()
    return found


def worker_cases(tokens: int, seconds: float) -> list[dict[str, Any]]:
    """The connector's worker itself, with a kvd that is a fake in this process."""
    from _convert_worker import worker_case

    found: list[dict[str, Any]] = []
    kinds = {"NHD": 60, "HND": 60, "MLA": 60, "gated delta net": 48}
    kinds |= {"native NHD": 60, "native gated delta net": 48}  # whole blocks, as they are
    for kind, layers in kinds.items():
        try:
            found.append(worker_case(kind, layers, tokens, best_s, turns_s, seconds))
        except (PrfaasError, RuntimeError) as error:
            found.append({"worker": kind, "error": repr(error)[:300]})
        torch.cuda.empty_cache()
    return found


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="per measurement")
    parser.add_argument("--cpu-only", action="store_true")
    parser.add_argument("--gpu-only", action="store_true")
    parser.add_argument("--gpu-tokens", type=int, default=8192, help="of a step")
    chosen = parser.parse_args(arguments)
    if chosen.gpu_tokens < 1024 or chosen.gpu_tokens % WIRE_TOKENS:
        parser.error("--gpu-tokens must be a multiple of 64, at least 1024")
    result: dict[str, Any] = {
        "machine": platform.machine(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    if not chosen.gpu_only:
        result["cpu"] = [cpu_case(*case, chosen.seconds) for case in CPU_CASES]
    if torch.cuda.is_available() and not chosen.cpu_only:
        result["gpu"] = {
            "device": torch.cuda.get_device_name(),
            "bus": plain_copies(chosen.seconds),
            "cases": gpu_cases(chosen.gpu_tokens, chosen.seconds),
            "workers": worker_cases(chosen.gpu_tokens, chosen.seconds),
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
