"""How many cases are drawn, with which seeds. The cases of a seed are drawn in chunks, one test
each, so that they use every core and a failure names a small part of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from hypothesis import Phase, settings
from hypothesis import seed as hypothesis_seed

SIMULATED_OF_CHUNK, LIVE_OF_CHUNK = 50, 5
# Of so many simulated cases there is one in the tests that run a case several times.
RARELY, RARELY_OF_CHUNK = 20, 10


class Draw(NamedTuple):
    """One chunk of cases."""

    seed: int
    chunk: int
    cases: int
    shrinks: bool = True  # whether a failure is made smaller

    def __str__(self) -> str:
        return f"seed{self.seed}-chunk{self.chunk}-of{self.cases}"


def chunks(seed: int, count: int, of_chunk: int) -> list[Draw]:
    """`count` cases; the last chunk may have fewer. A chunk is the same for every count above."""
    whole, rest = divmod(count, of_chunk)
    sizes = [of_chunk] * whole + [rest] * (rest > 0)
    return [Draw(seed, number, size) for number, size in enumerate(sizes)]


def drawn(draw: Draw) -> Callable[[Any], Any]:
    """Decorates a hypothesis test with the settings of a chunk."""

    def decorate(test: Any) -> Any:
        seeded = hypothesis_seed(draw.seed * 100_000 + draw.chunk)(test)
        phases = [Phase.generate, Phase.shrink] if draw.shrinks else [Phase.generate]
        return settings(max_examples=draw.cases, database=None, phases=phases)(seeded)

    return decorate
