"""How much may be tried again: a share of the traffic, so that a fault does not double the load.

Pure. Every request earns a part of a retry, every retry costs a whole one.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_ATTEMPTS = 4  # of one request, the first included


@dataclass(slots=True)
class RetryBudget:
    per_request: float = 0.2
    limit: float = 20.0  # what a quiet time may save up, and what there is at the start
    left: float = 20.0
    spent: int = 0
    denied: int = 0

    def request(self) -> None:
        self.left = min(self.limit, self.left + self.per_request)

    def take(self, attempts: int) -> bool:
        """Whether a request that has been tried `attempts` times may be tried once more."""
        if attempts >= MAX_ATTEMPTS or self.left < 1:
            self.denied += 1
            return False
        self.left -= 1
        self.spent += 1
        return True
