"""Models, accelerators and profiles, each value with its source. Users add entries in TOML."""

from prfaas.catalog.hardware import Accelerator, DecodePoint, PrefillPoint, ProfileRecord
from prfaas.catalog.load import Catalog
from prfaas.catalog.models import Model
from prfaas.catalog.provenance import Sourced, Status

__all__ = [
    "Accelerator",
    "Catalog",
    "DecodePoint",
    "Model",
    "PrefillPoint",
    "ProfileRecord",
    "Sourced",
    "Status",
]
