"""Where to keep linear states (and the windows beside them) while a prompt is prefilled.

A checkpoint can be taken at any block boundary that the prefill passes, so only beyond the hit. The
pool evicts other blocks to make room for `firm` checkpoints; `spare` ones use free pages only.

    prompt   |###### hit ######|------ attention run ------|=========== new ===========|..
             0                hit                         run                        last

    last     the last whole block: where a conversation continues
    every:n  each n-th block boundary
    branch   last, and run: this prompt leaves an earlier one there, so other prompts may too
    default  branch, and every 8,192 tokens as spares, which serve the first divergence too
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from prfaas.errors import InputError

DEFAULT_SPARE_TOKENS = 8192


class Checkpoints(NamedTuple):
    """Lengths in blocks, ascending, all beyond the hit."""

    firm: tuple[int, ...]
    spare: tuple[int, ...] = ()


class CheckpointPolicy(Protocol):
    def plan(self, blocks: int, hit: int, attention: int) -> Checkpoints:
        """The checkpoints of a prompt of `blocks` whole blocks, of which `hit` are reused and
        `attention` were found in the full-attention groups."""


@dataclass(frozen=True, slots=True)
class LastBoundary:
    def plan(self, blocks: int, hit: int, attention: int) -> Checkpoints:
        return Checkpoints((blocks,) if blocks > hit else ())


@dataclass(frozen=True, slots=True)
class EveryBlocks:
    interval: int

    def plan(self, blocks: int, hit: int, attention: int) -> Checkpoints:
        return Checkpoints(_multiples(self.interval, hit, blocks))


@dataclass(frozen=True, slots=True)
class BranchPoints:
    """Checkpoints at branch points, and spare ones every `spare_interval` blocks (None: none)."""

    spare_interval: int | None = None

    def plan(self, blocks: int, hit: int, attention: int) -> Checkpoints:
        firm = tuple(sorted({length for length in (attention, blocks) if length > hit}))
        if self.spare_interval is None:
            return Checkpoints(firm)
        spare = _multiples(self.spare_interval, hit, blocks)
        return Checkpoints(firm, tuple(length for length in spare if length not in firm))


def checkpoint_policy(name: str, block_tokens: int) -> CheckpointPolicy:
    """The policy of this name: `default`, `last`, `branch` or `every:N` (N in blocks)."""
    kind, _, argument = name.partition(":")
    match kind:
        case "default" if not argument:
            return BranchPoints(max(1, DEFAULT_SPARE_TOKENS // block_tokens))
        case "last" if not argument:
            return LastBoundary()
        case "branch" if not argument:
            return BranchPoints()
        case "every" if argument.isdecimal() and int(argument) > 0:
            return EveryBlocks(int(argument))
    raise InputError(
        f"unknown checkpoint policy {name!r}", fix="use default, last, branch or every:N"
    )


def _multiples(interval: int, after: int, upto: int) -> tuple[int, ...]:
    return tuple(range((after // interval + 1) * interval, upto + 1, interval))
