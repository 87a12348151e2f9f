"""One case of a study as it travels to a worker process and back.

The function of a study travels as bytes, with all that it refers to: functions and classes of a
script exist in no module that another process could import. A worker unpacks the function once,
because it may contain a whole trace of requests.
"""

from __future__ import annotations

import hashlib
import platform
import socket
import traceback
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

import prfaas
from prfaas.errors import InputError
from prfaas.studies.parallel.numeric_threads import one_numeric_thread

# Python writes bytecode of one minor version. numpy and scipy round differently from version to
# version.
_PACKAGES = ("numpy", "scipy")


class PackedCase(NamedTuple):
    name: str
    case: bytes
    # What must be equal on the worker's machine. None: the worker is a process of this machine.
    versions: Mapping[str, str] | None = None


class Outcome(NamedTuple):
    """What came of a case: its result, or why there is none."""

    name: str
    result: bytes = b""
    # An error of the input is raised again as it was. Of other errors only the text travels: their
    # classes may exist on the worker's machine alone.
    input_error: InputError | None = None
    failure: str = ""
    trace: str = ""


def pack(thing: object) -> bytes:
    return bytes(cloudpickle.dumps(thing))


def unpack(packed: bytes) -> Any:
    return cloudpickle.loads(packed)


@lru_cache(maxsize=2)
def _function(packed: bytes) -> Callable[[Any], Any]:
    return unpack(packed)  # type: ignore[no-any-return]


def run_packed(function: bytes, packed: PackedCase) -> Outcome:
    """Runs one case in a worker. Returns every error, because an exception may not survive the way
    back."""
    try:
        if packed.versions is not None:
            _check_versions(packed.versions)
        call, case = _function(function), unpack(packed.case)
        with one_numeric_thread():
            return Outcome(packed.name, pack(call(case)))
    except InputError as error:
        return Outcome(packed.name, input_error=error)
    except Exception as error:
        summary = "".join(traceback.format_exception_only(error)).strip()
        return Outcome(packed.name, failure=summary, trace=traceback.format_exc())


def _check_versions(expected: Mapping[str, str]) -> None:
    """Other code, or another numpy, would make results depend on the worker that a case ran on."""
    for name, ours in installed_versions().items():
        if ours != expected[name]:
            raise InputError(
                f"{socket.gethostname()} has {name} {ours}, and this machine has {expected[name]}",
                where="--cluster",
                fix="install the same versions on all machines",
            )


@cache
def installed_versions() -> Mapping[str, str]:
    """The version of Python and of everything that results depend on. The version of prfaas
    includes a digest of its files, which a checkout can change without a new number."""
    folder = Path(prfaas.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".toml"):
            digest.update(str(path.relative_to(folder)).encode())
            digest.update(path.read_bytes())
    major, minor, _ = platform.python_version_tuple()
    return {
        "prfaas": f"{prfaas.__version__} ({digest.hexdigest()[:12]})",
        "Python": f"{major}.{minor}",
        **{name: version(name) for name in _PACKAGES},
    }
