"""What the actors know, and their report. The file of a situation holds keys: its mode is 0600."""

from __future__ import annotations

from collections import Counter
from typing import Literal, TypeAlias

import msgspec

ActorName: TypeAlias = Literal["tenant", "member", "peer"]
ACTORS: tuple[ActorName, ...] = ("tenant", "member", "peer")


class KvdPlace(msgspec.Struct, frozen=True):
    """A kvd of the deployment."""

    node: str
    cluster: str
    http: str
    data: str  # HOST:PORT


class Situation(msgspec.Struct, frozen=True):
    """What the actors know."""

    actors: list[ActorName]  # those that run
    gateways: list[str]  # URLs
    model: str
    max_tokens: int  # of prompt and answer together
    tenant_key: str
    member_key: str
    kvds: list[KvdPlace]
    engines: list[str]  # URLs of the nodes
    # Whether the hostile member uses names of nodes that run. A kvd that is really gone may be
    # replaced at another address by one of its name, which a stolen key can pretend; so a soak with
    # faults, which kill kvds, does not do this.
    borrows_names: bool
    seed: int
    report: str  # file for the report
    only: list[str] = []  # kinds of attack of tenant and peer; none: all


class DeedCounts(msgspec.Struct):
    """What one kind of attack did and saw."""

    done: int = 0
    answers: dict[str, int] = {}  # such as "HTTP 400", "closed", "refused"; by count
    longest_s: float = 0.0  # until the answer or the end of the connection
    overdue: int = 0  # neither answered nor closed within the limit of this kind


class ActorsReport(msgspec.Struct):
    seconds: float
    cpu_share: float  # of one core
    deeds: dict[str, DeedCounts]  # by actor and kind, such as "tenant: brackets"
    failures: list[str]  # defects of the actors themselves

    @property
    def overdue(self) -> list[str]:
        return [name for name, one in self.deeds.items() if one.overdue]

    @property
    def internal_errors(self) -> list[str]:
        """Kinds that a service answered with HTTP 500: it met something that it does not handle."""
        return [name for name, one in self.deeds.items() if "HTTP 500" in one.answers]

    def answers(self, kind: str) -> dict[str, int]:
        return dict(self.deeds[kind].answers) if kind in self.deeds else {}


class Census:
    """Counts what the actors do and see."""

    def __init__(self) -> None:
        self.deeds: dict[str, DeedCounts] = {}
        self._failures: Counter[str] = Counter()

    def record(self, kind: str, answer: str, seconds: float, *, overdue: bool = False) -> None:
        one = self.deeds.setdefault(kind, DeedCounts(answers={}))
        one.done += 1
        one.answers[answer] = one.answers.get(answer, 0) + 1
        one.longest_s = max(one.longest_s, round(seconds, 2))
        one.overdue += overdue

    def record_failure(self, kind: str, error: BaseException) -> None:
        """An actor met a defect of its own; it goes on."""
        self._failures[f"{kind}: {type(error).__name__}: {str(error)[:200]}"] += 1

    @property
    def failures(self) -> list[str]:
        return [f"{what} ({count} times)" for what, count in self._failures.most_common(20)]
