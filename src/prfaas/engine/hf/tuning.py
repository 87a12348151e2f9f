"""Makes Triton's tuner fast enough to run before a node is ready.

Kernels of linear attention are tuned when they first run: every variant is compiled, one after the
other, and timed for an eighth of a second. There are about a hundred variants, and some kernels are
tuned again for every range of lengths. With `speed_up`,

- the variants of a kernel are compiled at the same time, on as many cores as the host has: in
  processes within `compiling_in_processes`, else in threads, which share the interpreter lock,
- at most `MOST_VARIANTS` are tried, spread over those that the kernel names,
- a variant is timed for a fifth of Triton's time, which is still hundreds of runs,
- a kernel that is known at one length is not tuned again at another, nor when it also gets a tensor
  that it can do without, such as the state before the first token.

Triton without these interfaces works as before, only slower. What is tuned is kept on disk by
Triton itself (`engine.kernel_cache`).
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from prfaas.engine.hf.compile_processes import CopyingExecutor

_LOG = logging.getLogger(__name__)
MOST_AT_ONCE = 32
MOST_VARIANTS = 5
TIMED_MS, UNTIMED_MS = 20, 5  # Triton's own: 100 and 25
# Arguments that grow with tokens or sequences. Kernels of the fla package have one or two of these
# in the key of their tuning, besides the sizes of heads.
LENGTH_KEYS = frozenset({"B", "N", "NB", "NT", "T"})
_CANDIDATES = "_prfaas_candidates"
_executor: Callable[[int], Executor] = ThreadPoolExecutor


def speed_up() -> bool:
    """Changes Triton's tuner in this process. False where there is no Triton, or one without the
    interfaces."""
    try:
        from triton import AsyncCompileMode
        from triton.runtime.autotuner import Autotuner
        from triton.testing import do_bench
    except ImportError:
        return False
    if not all(hasattr(Autotuner, name) for name in ("prune_configs", "_bench", "run")):
        return False
    quick = functools.partial(do_bench, warmup=UNTIMED_MS, rep=TIMED_MS)
    change_tuner(Autotuner, AsyncCompileMode, quick)
    return True


def change_tuner(tuner: Any, compile_mode: Any, quick: Any) -> None:
    """Changes the class `tuner`, once."""
    if getattr(tuner, "_prfaas_changed", False):
        return
    tuner._prfaas_changed = True
    prune, bench = tuner.prune_configs, tuner._bench

    def prune_configs(self: Any, kwargs: dict[str, Any]) -> Any:
        candidates = prune(self, kwargs)
        try:
            known = _config_of_another_length(self, kwargs, candidates)
        except Exception as error:  # of another version of Triton; it then tunes as it would
            _LOG.info("a kernel is tuned at every length: %r", error)
            known = None
        candidates = [known] if known is not None else spread(candidates, MOST_VARIANTS)
        setattr(self, _CANDIDATES, candidates)
        return candidates

    def bench_one(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
        candidates = getattr(self, _CANDIDATES, ())
        setattr(self, _CANDIDATES, ())
        if len(candidates) > 1:  # the first of them
            name = getattr(getattr(self, "base_fn", None), "__name__", "a kernel")
            began_s = time.monotonic()
            try:
                _compile_together(compile_mode, self.fn, candidates, args, meta)
            except Exception as error:  # the tuner compiles each by itself, and reports its errors
                _LOG.info("variants of %s are compiled one after the other: %r", name, error)
            else:
                seconds = time.monotonic() - began_s
                _LOG.info("compiled %d variants of %s in %.1f s", len(candidates), name, seconds)
        if getattr(self, "_do_bench", self) is None:  # the kernel has no timer of its own
            self.__dict__.setdefault("do_bench", quick)
        return bench(self, *args, config=config, **meta)

    tuner.prune_configs, tuner._bench = prune_configs, bench_one


@contextmanager
def compiling_in_processes() -> Iterator[None]:
    """For the start of a node, before other threads have begun their work."""
    global _executor
    before, _executor = _executor, CopyingExecutor
    try:
        yield
    finally:
        _executor = before


def spread(variants: Sequence[Any], most: int) -> Sequence[Any]:
    """At most that many of them, evenly from the first to the last."""
    if len(variants) <= most:
        return variants
    return [variants[place * (len(variants) - 1) // (most - 1)] for place in range(most)]


def _config_of_another_length(
    tuner: Any, kwargs: dict[str, Any], candidates: Sequence[Any]
) -> Any | None:
    """The candidate that was chosen for the same sizes at another length, or with other tensors of
    the same data types, if there is one."""
    every = {**tuner.nargs, **kwargs}
    args = {name: value for name, value in every.items() if name in tuner.arg_names}
    names = [name for name in tuner.keys if name in args]
    lengths = {place for place, name in enumerate(names) if name in LENGTH_KEYS}
    sizes = [args[name] for name in names]
    dtypes = {str(value.dtype) for value in args.values() if hasattr(value, "dtype")}
    for other, config in tuner.cache.items():
        # A key is the sizes, and then the data type of each tensor.
        same_sizes = all(
            place in lengths or other[place] == size for place, size in enumerate(sizes)
        )
        if same_sizes and set(other[len(sizes) :]) == dtypes:
            return next((one for one in candidates if str(one) == str(config)), None)
    return None


def _compile_together(
    compile_mode: Any,
    kernel: Any,
    candidates: Sequence[Any],
    args: tuple[Any, ...],
    meta: dict[str, Any],
) -> None:
    """Compiles without running. The errors of a candidate are left to the tuner, which expects some
    candidates to need more than the device has."""

    def compile_all() -> None:
        workers = min(len(candidates), os.cpu_count() or 1, MOST_AT_ONCE)
        with _executor(workers) as pool, compile_mode(pool, ignore_errors=True):
            for candidate in candidates:
                kernel.run(*args, **{**meta, **candidate.all_kwargs(), "warmup": True})

    # In a context of its own, because the mode would stay active if its end raised an error.
    contextvars.copy_context().run(compile_all)
