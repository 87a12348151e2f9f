"""Reads a Hugging Face `config.json` from disk; `hf_config` and `hf_shape` interpret it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prfaas.catalog.hf_config import ConfigGeometry, geometry_of
from prfaas.catalog.hf_quantization import KEY
from prfaas.catalog.hf_shape import shape_of
from prfaas.catalog.shape import ModelShape
from prfaas.config.strict import read_text
from prfaas.errors import InputError

# Checkpoints that ModelOpt quantised have the format in this file, and some of them only here.
MODELOPT_FILE = "hf_quant_config.json"


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
    raw = _with_quantization(_parsed(path), path.parent / MODELOPT_FILE)
    try:
        return shape_of(raw, name or path.resolve().parent.name)
    except InputError as error:
        raise error.in_file(path) from None


def _with_quantization(raw: Any, beside: Path) -> Any:
    """The config with the number format of the weights, where only ModelOpt's own file has it."""
    if not isinstance(raw, dict) or KEY in raw or not beside.is_file():
        return raw
    parsed = _parsed(beside)
    found = parsed.get("quantization") if isinstance(parsed, dict) else None
    if not isinstance(found, dict):
        raise InputError(
            "has no object named quantization", file=beside, fix="remove the file, or repair it"
        )
    return {**raw, KEY: {"quant_method": "modelopt", **found}}


def _file(path: Path) -> Path:
    return path / "config.json" if path.is_dir() else path


def _parsed(path: Path) -> Any:
    try:
        return json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON: {error}", file=path) from None
