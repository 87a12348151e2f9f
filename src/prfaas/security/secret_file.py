"""Secrets are given as files: a command line is for everybody to see."""

from __future__ import annotations

from pathlib import Path

from prfaas.config.strict import read_text
from prfaas.errors import InputError


def read_secret(path: Path) -> str:
    secret = read_text(path).strip()
    if not secret:
        raise InputError("is empty", file=path, fix="write the key into it")
    return secret
