"""What tests with servers share: models, prompts, what a plain vLLM answers, and running pairs."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from prfaas_lab.testing.vllm_server import Generated
from tests.vllm.pairs import Pair

MAX_TOKENS = 16
BLOCK = 128
# Around blocks (and windows: both are 128 tokens), around chunks of 256, several chunks long.
LENGTHS = [2, 3, 60, 127, 128, 129, 130, 200, 255, 256, 257, 258, 300, 384, 385, 400, 511, 512, 513]
LENGTHS += [514, 640, 700, 768, 769, 896, 1000, 1023, 1024, 1025, 1300]
TURNS = (700, 1100)  # a conversation: the second prompt continues the first
BRANCH = (1100, 700)  # a longer prompt first, then its beginning with another end
EDGES = [513, 641, 900, 901, 902, 2600]  # for controls (one token after a boundary) and faults
LONG = 2600


def _prompts() -> dict[str, list[list[int]]]:
    rng = random.Random(20)

    def draw(tokens: int) -> list[int]:
        return [rng.randrange(256) for _ in range(tokens)]

    def conversation() -> list[list[int]]:
        whole = draw(TURNS[1])
        return [whole[: TURNS[0]], whole]

    branch = draw(BRANCH[0])
    return {
        "all": [draw(length) for length in LENGTHS],
        "turns": conversation(),
        "branch": [branch, [*branch[: BRANCH[1] - 40], *draw(40)]],
        "edges": [draw(length) for length in EDGES],
        "faults": [draw(TURNS[1]) for _ in range(10)],
        "long": [draw(LONG) for _ in range(6)],
        "pinned": conversation(),
        "kept": conversation(),
        "continuations": [draw(EDGES[1])],
    }


PROMPTS = _prompts()
UNCACHED = ("--no-enable-prefix-caching", "--max-num-batched-tokens", "256")
CACHED = ("--enable-prefix-caching", "--max-num-batched-tokens", "256")
# Without Triton vLLM's Mamba kernels cannot cut a chunk at a block boundary: one block at a time.
ALIGNED = ("--enable-prefix-caching", "--mamba-cache-mode", "align")
ALIGNED += ("--max-num-batched-tokens", str(BLOCK))
WITH_CACHE = [("falcon-h1", ALIGNED), ("gemma3", CACHED)]
CASES = [
    pytest.param(("falcon-h1", UNCACHED), marks=pytest.mark.grid),
    pytest.param(("gemma3", UNCACHED), marks=pytest.mark.grid),
    *WITH_CACHE,
]


def case_id(case: tuple[str, tuple[str, ...]]) -> str:
    arch, flags = case
    return f"{arch}-{'uncached' if flags is UNCACHED else 'cached'}"


@dataclass(frozen=True, slots=True)
class Model:
    arch: str
    directory: Path
    expected: dict[str, list[Generated]]  # by name, as PROMPTS


@dataclass(frozen=True, slots=True)
class Case:
    model: Model
    pair: Pair
    cached: bool  # vLLM's own prefix cache


def boundary(tokens: int) -> int:
    """The last one that leaves a token to compute."""
    return (tokens - 1) // BLOCK * BLOCK
