"""One thread for numeric libraries.

Cases run side by side, so more threads per case would compete for the same cores. The number of
threads also decides how sums are split, and therefore how they are rounded: it must not differ
between a case that runs in this process and one that runs in a worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def one_numeric_thread() -> Iterator[None]:
    from threadpoolctl import threadpool_limits

    with threadpool_limits(limits=1):
        yield
