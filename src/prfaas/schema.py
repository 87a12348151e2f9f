"""Prepares msgspec types that several threads decode, before the threads start.

msgspec builds a Struct's type information when the Struct is first decoded, and publishes it before
it is complete. A second thread that decodes the same Struct at that moment crashes the process with
a segmentation fault (seen with msgspec 0.22 in a gateway that had just started). A module whose
Structs are decoded in several threads prepares them when it is imported.
"""

from __future__ import annotations

from typing import Any

import msgspec


def prepare(*kinds: Any) -> None:
    """Any thread may decode these types, and the types they contain, after this call."""
    for kind in kinds:
        msgspec.json.Decoder(kind)
