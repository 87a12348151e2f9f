"""Requests and their arrival times: Poisson, or replayed from a trace.

All randomness of a run is in here. The clock of a Mooncake trace ticks every 3 s: the seed spreads
the requests of a tick over those seconds. Two runs with the same seed see the same requests at the
same times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prfaas.config.trace import TRACE_BLOCK_TOKENS, TraceRow
from prfaas.errors import InputError
from prfaas.planner.network.problem import NetworkProblem
from prfaas.planner.workload import Workload
from prfaas.types import BlockHash

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """Columns, ascending in time. Every node holds `cached_tokens` of a prompt, as workloads state
    it. With `hashes`, the simulated caches determine the cached length instead. `answers` are the
    hashes of prompt and answer together, of each request; empty where nothing can be kept. `homes`
    are the numbers of the PD clusters at which the requests arrive; None: all at the only one."""

    at_s: Array
    prompt_tokens: Counts
    cached_tokens: Counts
    output_tokens: Counts
    hashes: Sequence[tuple[BlockHash, ...]] | None = None
    answers: Sequence[tuple[BlockHash, ...]] | None = None
    homes: Counts | None = None

    def __len__(self) -> int:
        return len(self.at_s)

    @property
    def mean_rps(self) -> float:
        return len(self) / float(self.at_s[-1])

    def scaled(self, speedup: float) -> Arrivals:
        """The same requests, `speedup` times as fast."""
        return Arrivals(
            self.at_s / speedup,
            self.prompt_tokens,
            self.cached_tokens,
            self.output_tokens,
            self.hashes,
            self.answers,
            self.homes,
        )


def poisson_at_homes(network: NetworkProblem, rps: float, requests: int, seed: int) -> Arrivals:
    """Poisson arrivals at every PD cluster, with its share of the total rate `rps` and with the
    lengths of its own workload."""
    if len(network.homes) == 1:
        return poisson(network.homes[0].problem.workload, rps, requests, seed)
    rng = np.random.default_rng(seed)
    at_s = np.cumsum(rng.exponential(1 / rps, requests))
    shares = np.array([home.share for home in network.homes])
    homes = rng.choice(len(shares), requests, p=shares / shares.sum())
    return draw_at_homes(network, at_s, homes, rng)


def draw_at_homes(
    network: NetworkProblem, at_s: Array, homes: Counts, rng: np.random.Generator
) -> Arrivals:
    """Draws the lengths of requests at given times and PD clusters."""
    columns = [np.zeros(len(at_s), dtype=np.int64) for _ in range(3)]
    for number, home in enumerate(network.homes):
        here = homes == number
        drawn = _draw_lengths(home.problem.workload, at_s[here], rng)
        lengths = (drawn.prompt_tokens, drawn.cached_tokens, drawn.output_tokens)
        for column, values in zip(columns, lengths, strict=True):
            column[here] = values
    prompt_tokens, cached_tokens, output_tokens = columns
    return Arrivals(at_s, prompt_tokens, cached_tokens, output_tokens, homes=homes)


def poisson(workload: Workload, rps: float, requests: int, seed: int) -> Arrivals:
    rng = np.random.default_rng(seed)
    return _draw_lengths(workload, np.cumsum(rng.exponential(1 / rps, requests)), rng)


def replay(
    rows: Sequence[TraceRow],
    seed: int,
    *,
    speedup: float = 1.0,
    bucket_s: float = 3.0,
) -> Arrivals:
    """A trace's requests. `bucket_s` is the width over which equal time stamps are spread."""
    if not rows:
        raise InputError("the trace has no requests")
    rng = np.random.default_rng(seed)
    stamps = np.array([row.timestamp for row in rows]) / 1e3
    backwards = np.flatnonzero(np.diff(stamps) < 0)
    if backwards.size or stamps[0] < 0:
        line = 1 if stamps[0] < 0 else int(backwards[0]) + 2
        raise InputError(
            f"timestamp {rows[line - 1].timestamp:g} ms is "
            + ("negative" if stamps[0] < 0 else "earlier than the one before it"),
            where=f"row {line}",
            fix="sort the rows by timestamp, in milliseconds from 0",
        )
    at_s = stamps + rng.uniform(0.0, bucket_s, len(rows))
    chosen = np.argsort(at_s, kind="stable")
    picked = [rows[index] for index in chosen]
    return Arrivals(
        at_s=at_s[chosen] / speedup,
        prompt_tokens=np.array([row.input_length for row in picked], dtype=np.int64),
        cached_tokens=np.zeros(len(picked), dtype=np.int64),
        output_tokens=np.array([row.output_length for row in picked], dtype=np.int64),
        hashes=[block_hashes(row) for row in picked],
        answers=[conversation_hashes(row) for row in picked],
    )


def _draw_lengths(workload: Workload, at_s: Array, rng: np.random.Generator) -> Arrivals:
    """Draws lengths. Output lengths are whole tokens with the workload's mean and variance."""
    atoms = rng.choice(len(workload.new), len(at_s), p=workload.weight / workload.weight.sum())
    cached = np.ceil(workload.cached[atoms]).astype(np.int64)
    new = np.ceil(workload.new[atoms]).astype(np.int64)
    output = np.full(len(at_s), workload.output_tokens)
    if workload.output_cv2 > 0:
        shape = 1 / workload.output_cv2
        output = rng.gamma(shape, workload.output_tokens / shape, len(at_s))
    whole = np.maximum(1, np.rint(output)).astype(np.int64)
    return Arrivals(at_s, new + cached, cached, whole)


def block_hashes(row: TraceRow) -> tuple[BlockHash, ...]:
    """Of whole blocks only: the last id often names a partial one, which no cache keeps."""
    whole = row.input_length // TRACE_BLOCK_TOKENS
    return _names(row.hash_ids[:whole])


def conversation_hashes(row: TraceRow) -> tuple[BlockHash, ...]:
    """Of the whole blocks of prompt and answer. Empty when the trace does not have them, or the
    answer completes no block."""
    if not row.answer_hash_ids:
        return ()
    whole = row.input_length // TRACE_BLOCK_TOKENS
    return _names([*row.hash_ids[:whole], *row.answer_hash_ids])


def _names(ids: Iterable[int]) -> tuple[BlockHash, ...]:
    return tuple(BlockHash(i.to_bytes(8, "big")) for i in ids)
