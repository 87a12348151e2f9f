"""What a pool stored and removed, in order, until the pool's owner takes it as `HashEvent`s."""

from __future__ import annotations

from typing import Literal, TypeAlias

from prfaas.types import BlockHash, HashEvent, NodeId

Action: TypeAlias = Literal["stored", "removed"]


class Journal:
    """Consecutive records of the same action on the same group become one event."""

    def __init__(self) -> None:
        self._runs: list[tuple[Action, str, list[BlockHash]]] = []

    def record(self, action: Action, group: str, name: BlockHash) -> None:
        if self._runs and self._runs[-1][:2] == (action, group):
            self._runs[-1][2].append(name)
        else:
            self._runs.append((action, group, [name]))

    def take(self, node: NodeId, block_tokens: int, first_seq: int) -> list[HashEvent]:
        """Everything since the last call, numbered from `first_seq`."""
        runs, self._runs = self._runs, []
        return [
            HashEvent(
                seq=first_seq + position,
                node=node,
                group=group,
                block_tokens=block_tokens,
                hashes=tuple(hashes),
                action=action,
            )
            for position, (action, group, hashes) in enumerate(runs)
        ]
