"""Who counts the bytes of answers that wait in this process, to be sent as a whole or until an
event has arrived to its end: the limits of one answer say nothing about many at once.

The request that waits for an answer sets the counter, and what reads the answer from a node calls
it. It is a context variable, because what lies between the two has nothing to do with it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import TypeAlias

# Called with the number of further bytes; a negative one when they are held no more. Raises
# `RequestError` when there is no room for them.
Count: TypeAlias = Callable[[int], None]


def _uncounted(nbytes: int) -> None:
    """A call of the gateway's own."""


counting: ContextVar[Count] = ContextVar("counting", default=_uncounted)
