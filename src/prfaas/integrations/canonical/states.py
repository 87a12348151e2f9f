"""The state of one linear layer of one rank: from an engine's block into pages, and back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from prfaas.integrations.canonical.heads import ConvShare
from prfaas.integrations.canonical.staging import Staged, StagingRing
from prfaas.kvspec.parts import Part


@dataclass(frozen=True, slots=True)
class StateForm:
    """What a state's block holds, and what its canonical bytes are."""

    parts: tuple[Part, ...]  # of the whole model: state and conv; the state alone without a history
    heads: range  # the model's heads whose states this rank holds
    channels: ConvShare | None = None  # None without a history
    conv_channels_first: bool = False  # the history is [channel, column], not [column, channel]
    transposed: bool = False  # a head's state is [v, k], on the wire [k, v]: delta rule on GPUs
    relabelled: bool = False  # the shape says [v, k], the bytes are [k, v]: delta rule on CPUs


class StateConverter:
    """One layer of one rank. `conv` is [block, ...] and `ssm` [block, head, ...], as vLLM binds them
    to the layer."""

    def __init__(
        self,
        conv: torch.Tensor | None,
        ssm: torch.Tensor,
        form: StateForm,
        ring: StagingRing | None = None,
    ) -> None:
        """InputError when the form does not suit the tensors. Tensors on a GPU need a `ring`."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Canonical bytes of the whole state, of all heads and channels."""
        raise NotImplementedError

    def save(self, block_id: int, buffers: Sequence[memoryview]) -> int:
        """Writes this rank's heads and the channels that it is to write, and no other byte. Returns
        the number of bytes written, after they are in place."""
        raise NotImplementedError

    def load(self, block_id: int, views: Sequence[memoryview]) -> int:
        """Reads this rank's heads and all channels that it holds. Returns the number of bytes read,
        after they are in place."""
        raise NotImplementedError

    def stage(self, block_id: int) -> Staged:
        """The first half of a save from a GPU, as `AttentionConverter.stage`."""
        raise NotImplementedError
