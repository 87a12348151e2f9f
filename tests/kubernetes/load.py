"""Clients that send one request after the other to both gateways, short and long ones."""

from __future__ import annotations

import threading
import urllib.error
from types import TracebackType

from tests.kubernetes.deployment import HOMES, LONG_TOKENS, SHORT_TOKENS, KubernetesDeployment
from tests.waiting import PATIENCE_S, wait_until

CLIENTS_OF_EACH = 1
LONG_EVERY = 4  # of the requests of a client


class Load:
    def __init__(self, deployment: KubernetesDeployment) -> None:
        self._deployment = deployment
        self._stop = threading.Event()
        self.served = dict.fromkeys(HOMES, 0)
        self.failures: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(home, number))
            for number in range(CLIENTS_OF_EACH)
            for home in HOMES
        ]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
            assert not thread.is_alive()

    def _run(self, home: str, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            tokens = SHORT_TOKENS if turn % LONG_EVERY else LONG_TOKENS
            try:
                answer = self._deployment.complete(home, tokens, seed=1000 * turn + number)
                assert answer["usage"]["completion_tokens"] == 4, answer
                self.served[home] += 1
            except (OSError, AssertionError) as error:
                reason = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                self.failures.append(f"{home}: {error!r} {reason}")

    def wait_for_more(self, requests: int) -> None:
        """Of every gateway."""
        goals = {home: served + requests for home, served in self.served.items()}
        wait_until(
            lambda: (
                bool(self.failures)
                or all(self.served[home] >= goal for home, goal in goals.items())
            )
        )
        self.check()

    def check(self) -> None:
        assert not self.failures, f"{len(self.failures)} failed; the first: {self.failures[0]}"
