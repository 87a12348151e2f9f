"""Processes with a low soft limit of open descriptors, as many systems start them."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOW = 256


@contextmanager
def low_limit() -> Iterator[int]:
    """Processes that are started here begin with a low soft limit. Yields the hard limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOW, hard))
    try:
        yield hard
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def soft_limit(process_id: int) -> int:
    limits = Path(f"/proc/{process_id}/limits").read_text()
    found = re.search(r"^Max open files +(\d+)", limits, re.M)
    assert found is not None
    return int(found[1])
