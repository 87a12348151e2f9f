"""When each process was killed or hung, and which requests that excuses. Pure.

Only two failures are excused: the gateway of the request was down during it, or the node that
decoded it was. No other fault may make a request fail, however large the part that it strikes.
"""

from __future__ import annotations

from prfaas_lab.faults.questions import Verdict


class Downtimes:
    """By the name of the process: from its end, or from when it hung, until it works again."""

    def __init__(self) -> None:
        self._ended: dict[str, list[tuple[float, float]]] = {}
        self._begun_s: dict[str, float] = {}

    def begin(self, name: str, now_s: float) -> None:
        self._begun_s.setdefault(name, now_s)

    def end(self, name: str, now_s: float) -> None:
        begun_s = self._begun_s.pop(name, None)
        if begun_s is not None:
            self._ended.setdefault(name, []).append((begun_s, now_s))

    def include(self, name: str, since_s: float, until_s: float) -> bool:
        """Whether the process was down at some moment of this time."""
        begun_s = self._begun_s.get(name)
        if begun_s is not None and begun_s <= until_s:
            return True
        return any(
            first_s <= until_s and last_s >= since_s
            for first_s, last_s in self._ended.get(name, ())
        )


def is_excused(verdict: Verdict, *, gateway_was_down: bool, decode_node_was_down: bool) -> bool:
    """Whether a request may have ended so."""
    match verdict:
        case Verdict.RIGHT | Verdict.LEFT:
            return True
        case Verdict.LOST:
            return gateway_was_down
        case Verdict.BROKEN:
            return decode_node_was_down
        case Verdict.REFUSED:
            # A gateway that has just been started again refuses requests until it knows its nodes.
            return gateway_was_down or decode_node_was_down
        case Verdict.WRONG:
            return False
