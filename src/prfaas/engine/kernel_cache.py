"""A folder in which compiled kernels and the results of tuning outlive a process. Torch-free.

Triton compiles a kernel when it first runs, and times its variants to choose one. Both take seconds
to minutes, and both can be kept on disk. What is kept is machine code that the next process loads,
so the folder must belong to this user, and no other user may write to it or replace it.
"""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

from prfaas.errors import InputError

_LOG = logging.getLogger(__name__)
WHERE = "node.kernel_cache"
# Folders of libraries that load code from them. Inductor's default lies in /tmp under a name that
# every user can guess and create first.
_FOLDERS = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
_SETTINGS = {"TRITON_CACHE_AUTOTUNING": "1"}  # Triton 3.4: results of tuning are kept, too


def use_kernel_cache(configured: str | None) -> Path:
    """Makes the libraries keep kernels in `configured`, or in the user's cache folder. Call it
    before torch is imported: Triton reads the environment then.

    A configured folder that others could write to is an InputError. Instead of a default folder of
    that kind, a temporary one is used, and a warning is logged. Folders that the environment names
    stay in use, under the same condition.
    """
    folder = _configured(Path(configured)) if configured is not None else _default()
    for variable, name in _FOLDERS.items():
        named = os.environ.get(variable)
        if named:
            _require_private(Path(named), where=variable)
        else:
            os.environ[variable] = str(folder / name)
            (folder / name).mkdir(mode=0o700, exist_ok=True)
    for variable, value in _SETTINGS.items():
        os.environ.setdefault(variable, value)
    return folder


def default_folder() -> Path:
    """XDG's cache folder of this user."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification ignores relative paths.
    root = Path(base) if os.path.isabs(base) else Path("~/.cache").expanduser()
    return root / "prfaas" / "kernels"


def _configured(folder: Path) -> Path:
    _require_private(folder, where=WHERE)
    return folder.absolute()


def _default() -> Path:
    try:
        folder = default_folder()
        _require_private(folder, where=WHERE)
    except (InputError, RuntimeError) as error:  # RuntimeError: the user has no home
        temporary = Path(tempfile.mkdtemp(prefix="prfaas-kernels-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        _LOG.warning("compiled kernels are not kept after this process: %s", error)
        return temporary
    return folder


def _require_private(folder: Path, *, where: str) -> None:
    """Creates the folder where it is missing. InputError unless only this user (or root) can change
    what a path through it leads to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # The real path: a link is as safe as what it leads to, and as the folder that holds it.
        for path in {folder.absolute(), folder.resolve()}:
            _check_owner(path, where)
    except OSError as error:
        raise InputError(
            f"cannot be used: {error.strerror}",
            file=folder,
            where=where,
            fix="name a folder that this user can write to",
        ) from None


def _check_owner(folder: Path, where: str) -> None:
    own = folder.stat()
    if own.st_uid != os.geteuid() or own.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InputError(
            "other users could write kernels into it",
            file=folder,
            where=where,
            fix="name a folder of this user with mode 0700",
        )
    for parent in folder.parents:
        found = parent.stat()
        shared = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        # In a folder with the sticky bit, as /tmp, only its owner can replace an entry.
        replaceable = shared and not found.st_mode & stat.S_ISVTX
        if replaceable or found.st_uid not in (0, os.geteuid()):
            raise InputError(
                f"other users could replace it, because they can write to {parent}",
                file=folder,
                where=where,
                fix="name a folder below folders of this user",
            )
