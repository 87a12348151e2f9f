"""Cases of studies, for tests. Worker processes import this module."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
from threadpoolctl import threadpool_info

from prfaas.errors import InputError


def draw(seed: int) -> tuple[int, float]:
    """The mean of a large product, whose rounding depends on how it is split."""
    rng = np.random.default_rng(seed)
    product = rng.standard_normal((300, 300)) @ rng.standard_normal((300, 300))
    return seed, float(product.mean())


def slow_first(seed: int) -> int:
    """Later cases end before earlier ones."""
    time.sleep(0.02 * max(0, 6 - seed))
    return seed


def numeric_threads(_: int) -> list[int]:
    np.ones((2, 2)) @ np.ones((2, 2))
    return [pool["num_threads"] for pool in threadpool_info()]


def bad_input(seed: int) -> int:
    if seed == 3:
        raise InputError("is 3", where="seed", fix="give another one")
    return seed


class OwnError(Exception):
    """An error whose pickled form cannot be read again."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def broken(seed: int) -> int:
    if seed == 3:
        raise OwnError("this", "that")
    return seed


def deadly(seed: int) -> int:
    if seed == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return seed


def process(_: int) -> int:
    return os.getpid()
