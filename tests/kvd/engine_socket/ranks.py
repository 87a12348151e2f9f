"""The ranks of an engine: each writes its heads of its layers into the segments of one lease.

python -m tests.kvd.engine_socket.ranks SOCKET TICKET RANK RANKS STAGE STAGES TOKENS
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from prfaas.engine.api import Export
from prfaas.engine.chunks import ExportPlan
from prfaas.engine.emulated.content import Content
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import WriteLease
from prfaas.kvd.engine_socket.messages import LeaseTicket
from prfaas.kvspec import (
    GQA,
    MLA,
    Geometry,
    Linear,
    LinearState,
    Segment,
    WindowedGQA,
    build_spec,
    layer_parts,
)
from prfaas.kvspec.geometry import dtype_bytes
from tests.cache.builders import BLOCK
from tests.kvd.hosts import COMPAT, prompt_of

KV_DTYPE, STATE_DTYPE = "bfloat16", "float32"
GEOMETRIES: tuple[Geometry, ...] = (
    GQA((0, 2), kv_heads=4, k_dim=3, v_dim=2),
    WindowedGQA((3,), kv_heads=2, k_dim=4, v_dim=4, window=7),
    Linear((1, 4), k_heads=2, v_heads=4, k_dim=3, v_dim=2, conv_kernel=4),
    MLA((5,), kv_lora_rank=6, rope_dim=2),
)
SPEC = build_spec(GEOMETRIES, kv_dtype=KV_DTYPE, state_dtype=STATE_DTYPE)
_GEOMETRY = dict(zip((group.name for group in SPEC.groups), GEOMETRIES, strict=True))


@dataclass(frozen=True)
class Rank:
    """One rank of tensor parallelism in one stage of pipeline parallelism."""

    rank: int
    ranks: int
    stage: int = 0
    stages: int = 1

    def heads(self, total: int) -> range:
        """Empty when another rank that holds the same heads writes them."""
        if self.rank % max(1, self.ranks // total):
            return range(0)
        first = self.rank * total // self.ranks
        return range(first, first + max(1, total // self.ranks))

    def shares(self, lease: WriteLease, chunk_tokens: int) -> Iterator[tuple[Segment, range]]:
        export = Export(lease, lease.tokens, lease.checkpoint_tokens, lease.skip_tokens)
        plan = ExportPlan(SPEC, export)
        ends = {*range(chunk_tokens, lease.tokens, chunk_tokens), lease.tokens}
        start = lease.match_tokens
        for end in sorted(e for e in ends | {*lease.checkpoint_tokens} if e > start):
            for layer in range(self.stage, 6, self.stages):
                for segment in (*plan.growing(layer, start, end), *plan.closing(layer, end)):
                    heads = self.heads(SPEC[segment.group].heads)
                    if heads:
                        yield segment, heads
            start = end

    def write(self, lease: WriteLease, prompt: Sequence[int], *, chunk_tokens: int) -> None:
        """Writes and reports every share of this rank, in an order of its own."""
        shares = list(self.shares(lease, chunk_tokens))
        random.Random(f"{self}").shuffle(shares)
        for segment, heads in shares:
            write_heads(lease, prompt, segment, heads)
            lease.ready(segment, heads)


def write_heads(lease: WriteLease, prompt: Sequence[int], segment: Segment, heads: range) -> None:
    """Only the bytes of these heads."""
    data, at = Content(SPEC, prompt).of(segment), 0
    row = _bytes_of(segment.group, heads)
    linear = isinstance(SPEC[segment.group], LinearState)
    mask = np.tile(row, 1 if linear else segment.stop - segment.start)
    for buffer in lease.buffers(segment):
        there = slice(at, at + buffer.nbytes)
        np.frombuffer(buffer, np.uint8)[mask[there]] = data[there][mask[there]]
        at += buffer.nbytes


def _bytes_of(group: str, heads: range) -> npt.NDArray[np.bool_]:
    """Which bytes of a token's row, or of a state, belong to these heads."""
    total = SPEC[group].heads
    parts = layer_parts(_GEOMETRY[group], kv_dtype=KV_DTYPE, state_dtype=STATE_DTYPE)
    masks: list[npt.NDArray[np.bool_]] = []
    for part in parts:
        mask = np.zeros(part.shape, np.bool_)
        # The channels of a convolution are divided among the heads in any way.
        mask[heads.start * part.shape[0] // total : heads.stop * part.shape[0] // total] = True
        masks.append(np.repeat(mask.reshape(-1), dtype_bytes(part.dtype)))
    return np.concatenate(masks)


def main(socket: str, ticket: str, rank: Rank, tokens: int) -> None:
    with KvdClient(
        Path(socket), engine_id=f"{rank}", spec=SPEC, block_tokens=BLOCK, compat=COMPAT
    ) as kvd:
        lease = kvd.join_write(msgspec.json.decode(ticket, type=LeaseTicket))
        rank.write(lease, prompt_of(tokens), chunk_tokens=5 + rank.rank)
        kvd.flush()
        sys.stdout.write("written\n")
        sys.stdout.flush()
        sys.stdin.read()  # until the test has committed: a writer that exits ends the transfer


if __name__ == "__main__":
    numbers = [int(text) for text in sys.argv[3:]]
    main(sys.argv[1], sys.argv[2], Rank(*numbers[:4]), numbers[4])
