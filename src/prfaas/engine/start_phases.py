"""Where the time of a start goes: one line in the log for each phase. And what a start does about
Python's garbage collection.

Torch and transformers make a million objects. A full collection visits all of them and stops every
thread for a third of a second, also in the middle of a request.
"""

from __future__ import annotations

import gc
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


@contextmanager
def without_collection() -> Iterator[None]:
    """For imports, which leave little garbage and trigger many collections."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def freeze_objects() -> None:
    """Collects once. Later collections do not visit what exists now."""
    gc.collect()
    gc.freeze()
