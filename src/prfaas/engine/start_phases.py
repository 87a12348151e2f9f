"""Where the time of a start goes: one line in the log for each phase."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

_LOG = logging.getLogger(__name__)


@contextmanager
def start_phase(done: str) -> Iterator[None]:
    """Logs what was `done`, in the past tense, and its seconds. A phase that fails has no line: its
    error says more."""
    began_s = time.monotonic()
    yield
    _LOG.info("start: %s in %.1f s", done, time.monotonic() - began_s)
