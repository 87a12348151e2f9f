"""Types of keys that several sections share. The unit of a number is in the name of its key."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Amount: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
AmountOrZero: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Share: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]
Port: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=65535)]
