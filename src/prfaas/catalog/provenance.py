"""Where a number comes from. Every catalog value carries this, and every report shows it."""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

# published: printed by its maker or in the paper.    measured: by this project, on real hardware.
# implied:   follows from a published number.         inferred: our reading; may be wrong.
# estimated: computed from counted work and fitted efficiencies; docs/estimates.md has its error.
Status: TypeAlias = Literal["published", "measured", "implied", "inferred", "estimated"]


class Sourced(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    value: float
    status: Status
    source: str
