"""Reads a Hugging Face `config.json` from disk; `hf_config` interprets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prfaas.catalog.hf_config import ConfigGeometry, geometry_of
from prfaas.config.strict import read_text
from prfaas.errors import InputError


def read_hf_config(path: Path) -> ConfigGeometry:
    """The geometry from a `config.json`, or from the one in a checkpoint directory."""
    if path.is_dir():
        path = path / "config.json"
    try:
        raw: Any = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error}", file=path) from None
    try:
        return geometry_of(raw)
    except InputError as error:
        raise error.in_file(path) from None
