"""The error of commands that need an optional part of the installation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.errors import InputError


@contextmanager
def engine_extra() -> Iterator[None]:
    """Wraps imports of modules that need torch. They are slow and optional, so a command imports
    them when it needs them."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(
            f"this command needs {error.name}", fix="install it: pip install 'prfaas[engine]'"
        ) from None
