"""Commands that need an optional part of the installation, and what to say when it is not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from prfaas.errors import InputError


@contextmanager
def engine_extra() -> Iterator[None]:
    """Around imports of what needs torch: slow, so made when called, and perhaps absent."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise InputError(
            f"models need {error.name}", fix="install the extra: pip install 'prfaas[engine]'"
        ) from None
