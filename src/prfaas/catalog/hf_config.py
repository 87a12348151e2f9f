"""A Hugging Face `config.json` into attention geometry: which layers cache what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prfaas.kvspec import Geometry


@dataclass(frozen=True, slots=True)
class ConfigGeometry:
    """What a config says of the cache: the geometry and the dtypes an engine would keep it in."""

    model_type: str
    geometries: tuple[Geometry, ...]
    kv_dtype: str
    state_dtype: str


def geometry_of(config: Mapping[str, Any]) -> ConfigGeometry:
    raise NotImplementedError
