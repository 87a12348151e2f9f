"""Schemas that several threads read with: built once, before there are threads.

msgspec builds what it needs to read a Struct when the Struct is first read, and publishes it before
it is complete. A second thread that reads the same Struct at that moment crashes the process with a
segmentation fault (seen with msgspec 0.22 in a gateway that had just started). A module whose
Structs are read in several threads prepares them when it is imported.
"""

from __future__ import annotations

from typing import Any

import msgspec


def prepare(*kinds: Any) -> None:
    """From now on these types, and all that they contain, can be read in any thread."""
    for kind in kinds:
        msgspec.json.Decoder(kind)
