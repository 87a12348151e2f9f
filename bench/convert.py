"""The rate at which caches are converted to the canonical form and back.

    prfaas bench convert [--seconds 0.5] [--cpu-only] [--gpu-only] [--gpu-tokens 8192]

CPU: save and load of one layer of 4,096 tokens (8 heads of 128 dims) in each packing, beside a
plain copy of as many bytes. GPU, where there is one: caches shaped like vLLM's, in 16-token blocks
in random order, of 60 attention layers (both layouts), 60 MLA layers and 48 delta-net layers:

    copy_out       gather on the device and copy to pinned host memory
    save           the same, and into the pages of an arena, which are pinned (direct) or not
    load           from the pages to the device, and scatter
    beside         the slow-down of 60 matmuls of 8192^3 while the copies run

Everything is checked against the path of the CPU before it is measured. The result is JSON; rates
are GB/s of canonical bytes, best of the rounds; on a CPU also per second of CPU time.
"""

from __future__ import annotations

import argparse
import json
import mmap
import platform
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from prfaas.errors import PrfaasError
from prfaas.integrations.canonical import (
    AttentionConverter,
    AttentionForm,
    Packing,
    Staged,
    StagingRing,
    StateConverter,
    StateForm,
    delta_rule_share,
    register_pages,
)
from prfaas.kvspec import Linear
from prfaas.kvspec.parts import Part

WIRE_TOKENS = 64
ARENA_BYTES_PER_TOKEN = 60 * 4096  # of the largest case
TIMEOUT_S = 60.0


class Arena:
    """Pages as a kvd lays them out: blocks of tokens, and all layers in a block."""

    def __init__(self, memory: memoryview, layers: int, piece_bytes: int, pieces: int) -> None:
        self._memory = memory
        self._layers, self._piece_bytes, self._pieces = layers, piece_bytes, pieces

    def buffers(self, layer: int) -> list[memoryview]:
        size, layers = self._piece_bytes, self._layers
        starts = [(piece * layers + layer) * size for piece in range(self._pieces)]
        return [self._memory[start : start + size] for start in starts]


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
class Pages:
    """Memory for the pages of any case, and staging beside it."""

    memory: memoryview
    ring: StagingRing


@dataclass
class GpuCase:
    """Layers of one kind, with functions for one layer, and the pages of all of them."""

    name: str
    layers: int
    nbytes: int  # canonical, of all layers
    stage: Callable[[int], Sequence[Staged]]
    finish: Callable[[int, Sequence[Staged]], None]
    load: Callable[[int], None]
    ring: StagingRing
    check: Callable[[], bool]


def attention_case(
    name: str, packing: Packing, order: str, layers: int, tokens: int, pages_of: Pages
) -> GpuCase:
    heads = 1 if packing == "mla" else 8
    count = tokens // 16
    form = AttentionForm(packing, attention_parts(packing, heads, "bfloat16"), range(heads))
    ring = pages_of.ring
    caches = [
        attention_cache(packing, 2 * count, heads, 16, "bfloat16", order, "cuda")
        for _ in range(layers)
    ]
    converters = [AttentionConverter(cache, 2 * count, form, ring) for cache in caches]
    ids = (torch.randperm(2 * count - 1)[:count] + 1).tolist()
    row = converters[0].row_bytes
    piece, pieces = WIRE_TOKENS * row, tokens // WIRE_TOKENS
    arena = Arena(pages_of.memory, layers, piece, pieces)
    pages = [arena.buffers(layer) for layer in range(layers)]

    def finish(layer: int, staged: Sequence[Staged]) -> None:
        for one in staged:
            one.finish(pages[layer])

    def load(layer: int) -> None:
        converters[layer].load(ids, 0, tokens, pages[layer], wait=False)

    def check() -> bool:
        """Awkward lengths, compared with the path of the CPU."""
        layer, start, stop = 1, 21, tokens - 27
        before = caches[layer].clone()
        twin = before.cpu()
        judge = AttentionConverter(twin, 2 * count, form)
        found, expected = bytearray((stop - start) * row), bytearray((stop - start) * row)
        some = ids[1 : -(-stop // 16)]
        with_pages = StagingRing("cuda", ring_bytes=1 << 24, timeout_s=TIMEOUT_S)
        small = AttentionConverter(caches[layer], 2 * count, form, with_pages)
        for target, converter in ((expected, judge), (found, small)):
            converter.save(some, start, stop, [memoryview(target)])
        if found != expected:
            return False
        staged = [converters[layer].stage(ids, 0, tokens)]
        caches[layer].fill_(float("nan"))  # queued after the gather
        finish(layer, staged)
        ring.fence()  # after the NaN
        load(layer)
        ring.finish_loads()
        is_same = torch.equal(caches[layer][ids], before[ids])
        for converter in (judge, small):
            converter.load(some, start, stop, [memoryview(expected)])
        is_same &= torch.equal(caches[layer][some].cpu(), twin[some])
        is_same &= not bool(caches[layer][some].isnan().any())
        caches[layer].copy_(before)
        return is_same

    return GpuCase(
        name,
        layers,
        layers * tokens * row,
        lambda layer: [converters[layer].stage(ids, 0, tokens)],
        finish,
        load,
        ring,
        check,
    )


def state_case(name: str, layers: int, requests: int, pages_of: Pages) -> GpuCase:
    """Qwen3-Next's delta nets: 32 value heads and 16 key heads of 128 dims, float32 states."""
    linear = Linear((0,), 16, 32, 128, 128, 4)
    channels = 2 * 16 * 128 + 32 * 128
    parts = (
        Part("state", (32, 128 * 128), "float32"),
        Part("conv", (channels, 3), "bfloat16"),
    )
    form = StateForm(parts, range(32), delta_rule_share(linear, 0, 1), transposed=True)
    ring = pages_of.ring
    tensors = [
        (
            torch.randn(2 * requests, 3, channels, device="cuda", dtype=torch.bfloat16),
            torch.randn(2 * requests, 32, 128, 128, device="cuda"),
        )
        for _ in range(layers)
    ]
    converters = [StateConverter(conv, ssm, form, ring) for conv, ssm in tensors]
    size = converters[0].state_bytes
    arena = Arena(pages_of.memory, layers, size, requests)
    pages = [arena.buffers(layer) for layer in range(layers)]
    blocks = (torch.randperm(2 * requests - 1)[:requests] + 1).tolist()

    def finish(layer: int, staged: Sequence[Staged]) -> None:
        for one, page in zip(staged, pages[layer], strict=True):
            one.finish([page])

    def load(layer: int) -> None:
        for block, page in zip(blocks, pages[layer], strict=True):
            converters[layer].load(block, [page], wait=False)

    def check() -> bool:
        conv, ssm = tensors[1]
        twin = StateConverter(conv.cpu(), ssm.cpu(), form)
        expected = bytearray(size)
        twin.save(blocks[0], [memoryview(expected)])
        finish(1, [converters[1].stage(block) for block in blocks])
        if bytes(pages[1][0]) != bytes(expected):
            return False
        before = conv.clone(), ssm.clone()
        conv.fill_(float("nan"))
        ssm.fill_(float("nan"))
        ring.fence()
        load(1)
        ring.finish_loads()
        is_same = torch.equal(conv[blocks], before[0][blocks])
        is_same &= torch.equal(ssm[blocks], before[1][blocks])
        conv.copy_(before[0])
        ssm.copy_(before[1])
        return is_same

    return GpuCase(
        name,
        layers,
        layers * requests * size,
        lambda layer: [converters[layer].stage(block) for block in blocks],
        finish,
        load,
        ring,
        check,
    )


def save_all(case: GpuCase, thread: ThreadPoolExecutor) -> None:
    """Layer after layer, as a model runs; a thread puts what has arrived into the pages."""
    layers = range(case.layers)
    for future in [thread.submit(case.finish, n, case.stage(n)) for n in layers]:
        future.result(TIMEOUT_S)
    torch.cuda.synchronize()


def copy_out_all(case: GpuCase) -> None:
    """Without the pages. Staging holds some layers, so the oldest is given up for the next."""
    waiting: list[Sequence[Staged]] = []
    for layer in range(case.layers):
        if len(waiting) == 4:
            for staged in waiting.pop(0):
                staged.discard()
        waiting.append(case.stage(layer))
    for some in waiting:
        for staged in some:
            staged.discard()
    torch.cuda.synchronize()


def load_all(case: GpuCase) -> None:
    for layer in range(case.layers):
        case.load(layer)
    case.ring.finish_loads()


def beside(case: GpuCase, thread: ThreadPoolExecutor, seconds: float) -> dict[str, float]:
    """Seconds of matmuls with and without copies; the copies take less time than the matmuls."""
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(factor)

    def multiply() -> None:
        torch.matmul(factor, factor, out=out)

    def alone() -> None:
        for _ in range(case.layers):
            multiply()
        torch.cuda.synchronize()

    def saving() -> None:
        """The time of the compute stream alone: the last copies may end later."""
        waiting: list[Future[None]] = []
        for layer in range(case.layers):
            multiply()
            waiting.append(thread.submit(case.finish, layer, case.stage(layer)))
        torch.cuda.current_stream().synchronize()
        ended.append(time.perf_counter())
        for future in waiting:
            future.result(TIMEOUT_S)

    def loading() -> None:
        case.ring.fence()
        future = thread.submit(load_all, case)
        for _ in range(case.layers):
            multiply()
        torch.cuda.current_stream().synchronize()
        ended.append(time.perf_counter())
        future.result(TIMEOUT_S)

    ended: list[float] = []

    def compute_s(work: Callable[[], None]) -> float:
        work()
        times = []
        for _ in range(3):
            torch.cuda.synchronize()
            started = time.perf_counter()
            work()
            times.append(ended[-1] - started)
        return min(times)

    alone_s = best_s(alone, seconds)
    saving_s, loading_s = compute_s(saving), compute_s(loading)
    again_s = best_s(alone, seconds)  # clocks change with heat
    alone_s = min(alone_s, again_s)
    return {
        "matmuls_ms": round(alone_s * 1e3, 2),
        "while_saving_ms": round(saving_s * 1e3, 2),
        "while_loading_ms": round(loading_s * 1e3, 2),
        "saving_costs": round(saving_s / alone_s - 1, 4),
        "loading_costs": round(loading_s / alone_s - 1, 4),
    }


def gpu_case(case: GpuCase, seconds: float) -> dict[str, Any]:
    gigabytes = case.nbytes / 1e9
    result: dict[str, Any] = {
        "case": case.name,
        "GB": round(gigabytes, 3),
        "exact": case.check(),
    }
    with ThreadPoolExecutor(2) as thread:  # one waits for the device, one queues the next copy
        if not case.ring.pages_pinned:  # else the device copies into the pages, not to the host
            took_s = best_s(lambda: copy_out_all(case), seconds)
            result["copy_out_GBps"] = rate(gigabytes, took_s)
        result["save_GBps"] = rate(gigabytes, best_s(lambda: save_all(case, thread), seconds))
        result["load_GBps"] = rate(gigabytes, best_s(lambda: load_all(case), seconds))
        result["beside"] = beside(case, thread, seconds)
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
    for pinned in (False, True):  # once pinned, memory stays so
        kind = "pinned pages" if pinned else "other pages"
        if pinned:
            register_pages(memory)
        ring = StagingRing("cuda", pages_pinned=pinned, timeout_s=TIMEOUT_S)
        pages = Pages(memory, ring)
        makers: list[Callable[[], GpuCase]] = [
            partial(attention_case, f"NHD, {kind}", "content", "NHD", 60, tokens, pages),
            partial(attention_case, f"HND, {kind}", "content", "HND", 60, tokens, pages),
            partial(attention_case, f"MLA, {kind}", "mla", "HND", 60, tokens, pages),
            partial(state_case, f"delta net, {kind}", 48, min(8, tokens // 1024), pages),
        ]
        for make in makers:
            try:
                found.append(gpu_case(make(), seconds))
            except (PrfaasError, RuntimeError) as error:  # other cases are still of interest
                found.append({"error": repr(error)[:300]})
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
        }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
