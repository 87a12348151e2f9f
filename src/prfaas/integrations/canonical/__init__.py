"""An engine's own cache layout <-> the canonical form, with torch alone.

    heads.py         which heads and channels of the model a rank holds, and which of them it writes
    packings.py      what is inside a block of a cache, as views of single tokens
    block_copies.py  blocks of a CPU beside rows, as views that one copy joins
    casts.py         between the data type of a cache and that of the wire
    row_pages.py     rows of canonical bytes over the pages of a segment
    page_copies.py   copies between a device and pinned pages
    staging.py       memory between a device and the pages
    attention.py     converts tokens of one attention layer of one rank
    states.py        converts the state of one linear layer of one rank

Independent of vLLM, of kvds and of requests.
"""

from prfaas.integrations.canonical.attention import AttentionConverter, AttentionForm
from prfaas.integrations.canonical.heads import ConvShare, Heads, delta_rule_share, mamba2_share
from prfaas.integrations.canonical.packings import Packing, find_cpu_packing
from prfaas.integrations.canonical.staging import Staged, StagingRing, register_pages
from prfaas.integrations.canonical.states import StateConverter, StateForm

__all__ = [
    "AttentionConverter",
    "AttentionForm",
    "ConvShare",
    "Heads",
    "Packing",
    "Staged",
    "StagingRing",
    "StateConverter",
    "StateForm",
    "delta_rule_share",
    "find_cpu_packing",
    "mamba2_share",
    "register_pages",
]
