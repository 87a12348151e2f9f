"""An engine's own cache layout <-> the canonical form, with torch alone.

    heads.py         which heads and channels of the model a rank holds, and which of them it writes
    packings.py      what is inside a block of a cache, as views of single tokens
    block_copies.py  blocks of a CPU beside rows, as views that one copy joins
    casts.py         between the data type of a cache and that of the wire
    row_moves.py     rows of several layers between caches and staging, with Triton or torch
    kernels.py       the Triton kernels of that
    row_batches.py   the same in pieces that fit into staging
    block_rows.py    whole blocks as rows, byte for byte, for engines that are equal
    attention.py     converts tokens of one attention layer of one rank
    states.py        converts the state of one linear layer of one rank

Bytes move with `prfaas.device`. Independent of vLLM, of kvds and of requests.
"""

from prfaas.integrations.canonical.attention import AttentionConverter, AttentionForm
from prfaas.integrations.canonical.heads import ConvShare, Heads, delta_rule_share, mamba2_share
from prfaas.integrations.canonical.packings import Packing, find_cpu_packing
from prfaas.integrations.canonical.states import StateConverter, StateForm

__all__ = [
    "AttentionConverter",
    "AttentionForm",
    "ConvShare",
    "Heads",
    "Packing",
    "StateConverter",
    "StateForm",
    "delta_rule_share",
    "find_cpu_packing",
    "mamba2_share",
]
