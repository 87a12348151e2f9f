"""The parts of one layer's canonical bytes, in the order in which they travel."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prfaas.kvspec.geometry import dtype_bytes

PartRole: TypeAlias = Literal["keys", "values", "latent", "rope", "state", "conv"]


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a layer, of the whole model.

    keys and values: (heads, dim) of one token. latent and rope: (dim,) of one token. state: (heads,
    elements of one head). conv: (channels, kernel - 1), the oldest column first.
    """

    role: PartRole
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * dtype_bytes(self.dtype)
