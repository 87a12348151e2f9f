"""The connector's worker on a GPU, with caches shaped like vLLM's, beside matmuls.

The kvd is a fake in this process: its leases and its arena are real, but no message leaves the
process. vLLM is not needed: of it, the worker uses a base class of the orders only.
"""

from __future__ import annotations

import os
import random
import sys
import time
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

import prfaas
from prfaas.cache.storage.arena import Arena, choose_layout
from prfaas.device import PagePins, StagingRing
from prfaas.integrations.canonical import (
    AttentionConverter,
    AttentionForm,
    StateConverter,
    StateForm,
    delta_rule_share,
)
from prfaas.kvd.engine_socket.leases import MappedArena, ReadLease, WriteLease
from prfaas.kvd.engine_socket.messages import LeaseTicket, UnitPages
from prfaas.kvspec import GQA, MLA, KVSpec, Linear, build_spec
from prfaas.kvspec.parts import layer_parts
from prfaas.kvspec.segments import block_bytes
from prfaas.types import CANONICAL

WIRE_TOKENS = 64
BLOCK_TOKENS = 16
NATIVE = "native "  # before the name of a kind
TIMEOUT_S = 60.0


def _without_vllm() -> None:
    """Where vLLM is not installed, the worker's modules can be imported without the connector."""
    try:
        import vllm  # noqa: F401
    except ImportError:
        package = types.ModuleType("prfaas.integrations.vllm")
        package.__path__ = [str(Path(prfaas.__file__).parent / "integrations" / "vllm")]
        sys.modules[package.__name__] = package
        parts = "vllm.distributed.kv_transfer.kv_connector.v1.base".split(".")
        for n in range(1, len(parts) + 1):
            sys.modules[".".join(parts[:n])] = types.ModuleType(".".join(parts[:n]))
        sys.modules[".".join(parts)].KVConnectorMetadata = object  # type: ignore[attr-defined]


_without_vllm()

from prfaas.integrations.vllm.caches.groups import CacheGroup, CacheLayout, Move  # noqa: E402
from prfaas.integrations.vllm.caches.joint_copies import CopiedLayer, JointCopies  # noqa: E402
from prfaas.integrations.vllm.caches.layer_copies import LayerCopies, native_copies  # noqa: E402
from prfaas.integrations.vllm.steps import LoadOrder, SaveOrder, StepOrders  # noqa: E402
from prfaas.integrations.vllm.worker_side import WorkerSide  # noqa: E402


class FakeKvd:
    """A client of a kvd that answers at once."""

    gone = False

    def __init__(self, spec: KVSpec, block_tokens: int, units: Sequence[tuple[int, int]]) -> None:
        """`units`: (group, block or length) that the arena holds, on pages in random order."""
        layout = choose_layout([block_bytes(group, block_tokens) for group in spec.groups])
        needed = [layout.pages(group) for group, _ in units]
        pages = sum(needed)
        fd = os.memfd_create("prfaas-bench")
        os.ftruncate(fd, pages * layout.page_bytes)
        self.arena = MappedArena(spec, block_tokens, Arena(fd, layout.page_bytes, pages))
        os.close(fd)
        order = list(range(len(units)))
        random.Random(1).shuffle(order)
        starts = [sum(needed[:n]) for n in range(len(units))]
        self.units = tuple(
            UnitPages(*units[n], tuple(range(starts[at], starts[at] + needed[n])))
            for n, at in enumerate(order)
        ) if len(set(needed)) == 1 else tuple(
            UnitPages(*unit, tuple(range(start, start + count)))
            for unit, start, count in zip(units, starts, needed, strict=True)
        )  # fmt: skip
        self.said_ready = 0

    def ticket(self, tokens: int) -> LeaseTicket:
        return LeaseTicket(1, tokens, 0, {}, (), self.units, self.units)

    def join_write(self, ticket: LeaseTicket) -> WriteLease:
        return WriteLease(ticket, self.arena, self, Future())  # type: ignore[arg-type]

    def join_read(self, ticket: LeaseTicket) -> ReadLease:
        return ReadLease(ticket, self.arena, self)  # type: ignore[arg-type]

    def ready(self, lease_id: int, segment: object) -> None:
        self.said_ready += 1

    def call(self, call: object) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Bench:
    """One worker whose model has `layers` layers of one kind. Native kinds: whole blocks."""

    def __init__(self, kind: str, layers: int, tokens: int, device: str = "cuda") -> None:
        self.layers, self.tokens = layers, tokens
        is_native, kind = kind.startswith(NATIVE), kind.removeprefix(NATIVE)
        block_tokens = BLOCK_TOKENS if is_native else WIRE_TOKENS
        numbers = tuple(range(layers))
        geometry: Any = {
            "NHD": GQA(numbers, 8, 128, 128),
            "HND": GQA(numbers, 8, 128, 128),
            "MLA": MLA(numbers, 512, 64),
            "gated delta net": Linear(numbers, 16, 32, 128, 128, 4),
        }[kind]
        spec = build_spec([geometry], kv_dtype="bfloat16", state_dtype="float32")
        parts = layer_parts(geometry, kv_dtype="bfloat16", state_dtype="float32")
        self.names = [f"model.layers.{n}.attn" for n in numbers]
        pins = PagePins(device) if device == "cuda" else None
        ring = StagingRing(device, pins=pins, timeout_s=TIMEOUT_S)
        self.is_state = isinstance(geometry, Linear)
        requests = 8 if self.is_state else 1
        count = tokens // BLOCK_TOKENS
        copied: dict[str, CopiedLayer] = {}
        self.tensors: list[torch.Tensor] = []
        for name in self.names:
            if self.is_state and is_native:  # a page of a state
                size = block_bytes(spec.groups[0], 1) // layers
                self.tensors.append(torch.randn(16, 1, 1, size // 4, device=device))
                continue
            if self.is_state:
                channels = parts[1].shape[0]
                conv = torch.randn(16, 3, channels, device=device, dtype=torch.bfloat16)
                ssm = torch.randn(16, 32, 128, 128, device=device)
                share = delta_rule_share(geometry, 0, 1)
                form = StateForm(tuple(parts), range(32), share, transposed=True)
                state = StateConverter(conv, ssm, form, ring)
                copied[name] = CopiedLayer(state.rows_written, state.rows_held, row_tokens=None)
                self.tensors += [conv, ssm]
                continue
            heads, content = (1, 576) if kind == "MLA" else (8, 256)
            sizes = (2 * count, heads, BLOCK_TOKENS, content)
            if kind == "NHD":
                sizes = (2 * count, BLOCK_TOKENS, heads, content)
            cache = torch.randn(sizes, device=device, dtype=torch.bfloat16)
            cache = cache.transpose(1, 2) if kind == "NHD" else cache
            self.tensors.append(cache)
            if is_native:
                continue
            packing: Any = "mla" if kind == "MLA" else "content"
            attention = AttentionForm(packing, (parts[0], parts[1]), range(heads))
            converter = AttentionConverter(cache, 2 * count, attention, ring)
            copied[name] = CopiedLayer(converter.rows, converter.rows, row_tokens=1)
        group = CacheGroup(
            0,
            "state" if self.is_state else "full",
            spec.groups[0],
            BLOCK_TOKENS,
            tuple(zip(self.names, numbers, strict=True)),
        )
        layout = CacheLayout((group,), spec, block_tokens, whole=BLOCK_TOKENS if is_native else 1)
        if self.is_state:
            units = [(0, tokens + n) for n in range(requests)]
            ids = (torch.randperm(15)[:requests] + 1).tolist()
            self.moves = [(Move(0, 0, tokens + n, (ids[n],)),) for n in range(requests)]
        else:
            units = [(0, block) for block in range(tokens // block_tokens)]
            ids = (torch.randperm(2 * count - 1)[:count] + 1).tolist()
            self.moves = [(Move(0, 0, tokens, tuple(ids)),)]
        self.used = torch.tensor(sorted(ids), device=device)
        self.kvd = FakeKvd(spec, block_tokens, units)
        self.nbytes = len(units) * block_bytes(spec.groups[0], block_tokens)
        self.worker = WorkerSide(self.kvd, layout)  # type: ignore[arg-type]
        if is_native:
            tensors = dict(zip(self.names, self.tensors, strict=True))
            copies = native_copies(layout, tensors, 16 if self.is_state else 2 * count, ring)
        else:
            joint = JointCopies(ring, copied, block_tokens)
            copies = LayerCopies({name: _Writes() for name in self.names}, ring.fence, joint)
        self.worker.set_copies(copies)

    def save(self, each: Callable[[], None] | None = None, *, last: bool = True) -> None:
        """A step that saves all tokens. `each` is called for every layer. With `last`, everything
        is in the pages when it returns, else after `wait_for_saves`."""
        ticket = self.kvd.ticket(self.tokens)
        orders = [SaveOrder(f"r{n}", ticket, m, last, CANONICAL) for n, m in enumerate(self.moves)]
        self.worker.begin_step(StepOrders(saves=orders))
        for name in self.names:
            if each is not None:
                each()
            if not self.is_state:  # linear layers have no hook
                self.worker.save_layer(name)
        self.worker.end_step()

    def wait_for_saves(self) -> None:
        names = [f"r{n}" for n in range(len(self.moves))]
        self.worker.begin_step(StepOrders(ended=names))
        self.worker.take_results(set(names))

    def load(self) -> None:
        self.start_loads()
        self.wait_for_loads()

    def start_loads(self) -> None:
        ticket = self.kvd.ticket(self.tokens)
        orders = [
            LoadOrder(f"r{n}", ticket, moves, CANONICAL) for n, moves in enumerate(self.moves)
        ]
        self.worker.start_loads(StepOrders(loads=orders))

    def wait_for_loads(self) -> None:
        missing = {f"r{n}" for n in range(len(self.moves))}
        deadline = time.monotonic() + TIMEOUT_S
        while missing:
            results = self.worker.take_results(set())
            assert not results.failed, results.failed
            missing -= results.loaded
            assert time.monotonic() < deadline, missing
            time.sleep(0.0002)

    def check(self) -> bool:
        before = [tensor[self.used].clone() for tensor in self.tensors]
        self.kvd.said_ready = 0
        self.save()
        is_right = self.kvd.said_ready == self.layers * len(self.moves)
        for tensor in self.tensors:
            tensor.fill_(float("nan"))
        self.load()
        return is_right and all(
            torch.equal(tensor[self.used], saved)
            for tensor, saved in zip(self.tensors, before, strict=True)
        )


class _Writes:
    writes, heads, blocks = True, None, ()

    def save(self, move: Move, pages: Sequence[memoryview]) -> int:
        raise NotImplementedError

    load = save

    def of_blocks(self, blocks: Sequence[torch.Tensor]) -> _Writes:
        raise NotImplementedError


def worker_case(
    kind: str,
    layers: int,
    tokens: int,
    best_s: Callable[..., float],
    turns_s: Callable[..., list[float]],
    seconds: float,
) -> dict[str, Any]:
    bench = Bench(kind, layers, tokens)
    gigabytes = bench.nbytes / 1e9
    factor = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(factor)

    def multiply() -> None:
        torch.matmul(factor, factor, out=out)

    def alone() -> None:
        for _ in range(layers):
            multiply()

    def saving() -> None:
        bench.save(multiply, last=False)
        ends.append(bench.wait_for_saves)

    def loading() -> None:
        bench.start_loads()
        alone()
        ends.append(bench.wait_for_loads)

    ends: list[Callable[[], None]] = []

    def end() -> None:
        while ends:
            ends.pop()()

    result: dict[str, Any] = {
        "worker": kind,
        "GB": round(gigabytes, 3),
        "exact": bench.check(),
    }
    result["save_GBps"] = round(gigabytes / best_s(bench.save, seconds), 2)
    result["load_GBps"] = round(gigabytes / best_s(bench.load, seconds), 2)
    alone_s, saving_s, loading_s = turns_s([alone, saving, loading], end, 9)
    result["matmuls_ms"] = round(alone_s * 1e3, 2)
    result["saving_costs"] = round(saving_s / alone_s - 1, 4)
    result["loading_costs"] = round(loading_s / alone_s - 1, 4)
    bench.worker.close()
    return result
