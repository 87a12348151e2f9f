"""What makes the imports of large libraries quick. Torch-free.

Bytecode: images of containers often have none, because `uv` writes none by default, and
PYTHONDONTWRITEBYTECODE forbids it. Then every start compiles the sources of torch again, which
takes longer than the rest of the imports. A folder of this user keeps the bytecode instead, and at
the first start other processes compile ahead of the imports. Python itself decides by a source's
time and size whether bytecode is still right.

Libraries that another one imports only because they are installed can be hidden from it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from prfaas.interpreter import module_command

_LOG = logging.getLogger(__name__)
# In the order of the imports. Each of them takes a tenth of a second or more without bytecode.
LIBRARIES = ("torch", "sympy", "mpmath", "triton", "transformers", "fla")
# The model's own file is one of thousands; the import compiles it.
_LEFT_OUT = r"[/\\](models|tests?|testing|_inductor)[/\\]"
MOST_PROCESSES = 8
END_S = 5.0


@contextmanager
def kept_bytecode(folder: Path, libraries: Sequence[str] = LIBRARIES) -> Iterator[None]:
    """For imports of the libraries. Where the first one has no bytecode of its own, bytecode is
    read from the folder from now on, and written to it. The folder must be private: what is in it
    is code."""
    found = [spec.origin for name in libraries if (spec := find_spec(name)) and spec.origin]
    if not found or sys.pycache_prefix is not None or Path(cache_from_source(found[0])).exists():
        yield
        return
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    if Path(cache_from_source(found[0])).exists():
        yield
        return
    _LOG.info("start: %s has no bytecode; it is compiled and kept in %s", libraries[0], folder)
    with _compiling_ahead([str(Path(origin).parent) for origin in found]):
        yield


@contextmanager
def hidden(library: str) -> Iterator[None]:
    """Meanwhile, others find that the library is not installed."""
    if library in sys.modules:
        yield
        return
    sys.modules[library] = None  # type: ignore[assignment]  # Python's way to forbid an import
    try:
        yield
    finally:
        sys.modules.pop(library, None)


@contextmanager
def _compiling_ahead(folders: Sequence[str]) -> Iterator[None]:
    processes = min(os.cpu_count() or 1, MOST_PROCESSES)
    if processes < 2:  # compiling would delay the imports
        yield
        return
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(sys.pycache_prefix)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = module_command("compileall", "-qq", "-j", str(processes), "-x", _LEFT_OUT)
    try:
        compiling = subprocess.Popen(
            [*command, *folders],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # so that its own processes end with it
        )
    except OSError as error:
        _LOG.info("start: bytecode is compiled by the imports alone: %s", error)
        yield
        return
    try:
        yield
    finally:
        _end(compiling)


def _end(compiling: subprocess.Popen[bytes]) -> None:
    """What the imports did not need by now can be compiled by a later one."""
    try:
        os.killpg(compiling.pid, signal.SIGTERM)
    except ProcessLookupError:
        pass
    try:
        compiling.wait(END_S)
    except subprocess.TimeoutExpired:
        compiling.kill()
        compiling.wait(END_S)
