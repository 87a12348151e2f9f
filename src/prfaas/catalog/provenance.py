"""Where a number comes from. Every catalog value carries this, and every report shows it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

# published: printed by its maker or in the paper.    measured: by this project, on real hardware.
# implied:   follows from a published number.         inferred: our reading; may be wrong.
Status: TypeAlias = Literal["published", "measured", "implied", "inferred"]


class Sourced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: float
    status: Status
    source: str
