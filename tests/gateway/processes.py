"""`prfaas gateway` as an operator starts it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec

from prfaas.config import Deployment
from prfaas.contracts.readiness import GatewayReady
from tests.gateway.backends import written
from tests.node.hosts import START_S, Process, call
from tests.waiting import wait_until


class GatewayProcess(Process):
    """`key`: the operator's, where the gateway has keys."""

    def __init__(self, file: Path, *options: str, key: str = "") -> None:
        super().__init__("gateway", str(file), *options)
        self._key = key

    @cached_property
    def url(self) -> str:
        return self.ready(GatewayReady).http

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        """A request of the operator, which must succeed."""
        status, found = call(method, f"{self.url}{path}", body, self._key)
        assert status == 200, found
        return found

    def state(self) -> Any:
        return self.ask("GET", "/prfaas/v1/state")

    def cluster(self, name: str) -> Any:
        (found,) = [one for one in self.state()["clusters"] if one["cluster"] == name]
        return found

    def in_use(self, *clusters: str) -> list[Any]:
        """The nodes of these clusters, of all by default."""
        found = self.state()["clusters"]
        asked = [one for one in found if not clusters or one["cluster"] in clusters]
        return [node for one in asked for node in one["nodes"] if node.get("in_use")]

    def wait_until_all_in_use(self) -> None:
        def are_in_use() -> bool:
            clusters = self.state()["clusters"]
            return all(node.get("in_use") for one in clusters for node in one["nodes"])

        wait_until(are_in_use, within_s=START_S)

    def end(self) -> None:
        """Kills it, unless it has ended."""
        if self.popen.poll() is None:
            self.kill()


@contextmanager
def gateway_process(
    folder: Path,
    made: Deployment | dict[str, Any],
    *options: str,
    key: str = "",
    **section: Any,
) -> Iterator[GatewayProcess]:
    """A gateway over the nodes of a deployment, whose section `gateway` has a port of the system
    and `section`. It is killed at the end, if it still runs."""
    raw = {**msgspec.to_builtins(made), "gateway": {"port": 0, **section}}
    process = GatewayProcess(written(raw, folder / "deployment.toml"), *options, key=key)
    try:
        yield process
    finally:
        process.end()
