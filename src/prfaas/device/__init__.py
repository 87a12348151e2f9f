"""Between a GPU and the pages of an arena, with torch alone. Shared by every engine.

    row_pages.py       rows of canonical bytes over the pages of a segment
    page_pins.py       pages that are registered with CUDA
    page_copies.py     copies between a device and pinned pages
    staging.py         memory between a device and the pages
    staging_memory.py  that memory, which rings for several arenas share

Independent of engines, of kvds and of requests.
"""

from prfaas.device.page_pins import PagePins, PinsAhead
from prfaas.device.staging import Staged, StagingRing

__all__ = ["PagePins", "PinsAhead", "Staged", "StagingRing"]
