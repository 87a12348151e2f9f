"""Writes the self-contained pages of `--html`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prfaas.console.page import self_contained
from prfaas.errors import InputError


def check_html(path: Path) -> None:
    """Raises InputError if the file cannot be written: before a long run, and not after it."""
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
        if not existed:
            path.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def write_html(path: Path, title: str, data: dict[str, Any]) -> Path:
    page = self_contained(title, "report", data)
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None
    return path


def _unwritable(path: Path, error: OSError) -> InputError:
    return InputError(
        f"cannot write the file: {error.strerror}",
        file=path,
        where="--html",
        fix="name a file in a writable folder",
    )
