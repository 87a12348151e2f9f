"""Reads a Hugging Face `config.json` from disk; `hf_config` and `hf_shape` interpret it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prfaas.catalog.hf_config import ConfigGeometry, geometry_of
from prfaas.catalog.hf_shape import shape_of
from prfaas.catalog.shape import ModelShape
from prfaas.config.strict import read_text
from prfaas.errors import InputError


def read_hf_config(path: Path) -> ConfigGeometry:
    """The geometry from a `config.json`, or from the one in a checkpoint directory."""
    path = _file(path)
    raw = _parsed(path)
    try:
        return geometry_of(raw)
    except InputError as error:
        raise error.in_file(path) from None


def read_hf_shape(path: Path, name: str | None = None) -> ModelShape:
    """The shape of the same model, named like its directory unless `name` is given. Needs more
    fields than the geometry."""
    path = _file(path)
    raw = _parsed(path)
    try:
        return shape_of(raw, name or path.resolve().parent.name)
    except InputError as error:
        raise error.in_file(path) from None


def _file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _parsed(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error}", file=path) from None
