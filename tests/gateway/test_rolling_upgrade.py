"""A rolling upgrade under load: nodes restart with another KV format, one after the other.

Every process is a real one. The new format is a new model revision of the emulated engine: its
state has another size (`node.emulated.byte_scale`), which its revision names.
"""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest

from prfaas.contracts.readiness import GatewayReady
from tests.gateway.backends import FAR, HOME, MODEL, THRESHOLD, deployment, prompt, written
from tests.gateway.conftest import QUICK
from tests.node.hosts import START_S, Host, Process, call
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * START_S)]

OLD, NEW = "1e-4", "1.1e-4"  # scales of the state, and so revisions
# The third asks for so many tokens that some of its streams run at a node when it drains.
ASKED = ((THRESHOLD // 4, 20), (2 * THRESHOLD, 20), (THRESHOLD // 4, 800))


class UpgradableHost(Host):
    def __init__(self, folder: Path, name: str, accelerator: str) -> None:
        self.name = name
        self._common = (*QUICK, "--accelerator", accelerator)
        super().__init__(folder, self._with(OLD), ("--node", name))

    def _with(self, scale: str) -> tuple[str, ...]:
        return (*self._common, "--set", f"node.emulated.byte_scale={scale}")

    def upgrade(self) -> None:
        """SIGTERM, and the same host again at the same addresses, with the new revision."""
        port = urlsplit(self.url).port
        assert self.node.stop() == 0 and self.kvd.stop() == 0
        self._node_options = (*self._with(NEW), "--port", str(port))
        self.start_kvd()
        self.begin_node()
        self.wait_until_ready()


@dataclass(slots=True)
class Seen:
    """One poll of the gateway's state."""

    at_s: float
    revisions: dict[str, str]  # by node, of those in use
    unexplained: list[str]  # nodes that are not in use, without a reason
    formats: int  # sets


@dataclass(slots=True)
class Watch:
    """Clients and a poller, each with its thread, until the block ends."""

    url: str
    expected: dict[tuple[int, int, int], list[int]]
    answered: int = 0
    problems: list[str] = field(default_factory=list)
    polls: list[Seen] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._poll)]
        threads += [threading.Thread(target=self._ask, args=(n,)) for n in range(len(ASKED) + 1)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in threads:
                thread.join(PATIENCE_S)

    def _ask(self, client: int) -> None:
        number = 0
        while not self._over.is_set():
            tokens, length = ASKED[client % len(ASKED)]
            question = (tokens, number % 4, length)
            number += 1
            try:
                found = streamed_tokens(self.url, prompt(*question[:2]), length)
            except (OSError, AssertionError) as error:
                found = []
                self.problems.append(f"{question}: {describe(error)}")
            if found and found != self.expected[question]:
                self.problems.append(f"{question}: {len(found)} tokens, and not the right ones")
            self.answered += 1

    def _poll(self) -> None:
        while not self._over.wait(0.05):
            seen = state(self.url)
            nodes = [n for cluster in seen["clusters"] for n in cluster["nodes"]]
            self.polls.append(
                Seen(
                    time.monotonic(),
                    {n["node"]: n["format"]["revision"] for n in nodes if n.get("in_use")},
                    [n["kvd_url"] for n in nodes if bool(n.get("in_use")) == bool(n["not_used"])],
                    len(seen["sets"]),
                )
            )

    def revision(self, node: str, at_s: float) -> str | None:
        """What the node had at this time; None where it was restarting or has just restarted."""
        before = [seen for seen in self.polls if seen.at_s <= at_s][-1:]
        after = [seen for seen in self.polls if seen.at_s > at_s][:1]
        found = {seen.revisions.get(node) for seen in before + after}
        return found.pop() if len(found) == 1 else None


def describe(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        with error:
            return f"{error.code} {error.read().decode()}"
    return repr(error)


def streamed_tokens(url: str, ids: list[int], max_tokens: int) -> list[int]:
    body = {"model": MODEL, "prompt": ids, "max_tokens": max_tokens, "temperature": 0.0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as stream:
        lines = stream.read().splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    assert all("error" not in event for event in events), events[-1]
    assert b"data: [DONE]" in lines, "the stream has no end"
    return [token for event in events for c in event["choices"] for token in c["token_ids"]]


def state(url: str) -> Any:
    return call("GET", f"{url}/prfaas/v1/state")[1]


def roles(seen: Any) -> dict[str, str]:
    return {n["node"]: n["role"] for c in seen["clusters"] for n in c["nodes"]}


def in_use(url: str, revision: str) -> set[str]:
    nodes = [n for cluster in state(url)["clusters"] for n in cluster["nodes"] if n.get("in_use")]
    return {n["node"] for n in nodes if n["format"]["revision"] == f"bytes x {float(revision):g}"}


@contextmanager
def deployed(folder: Path, homes: int, fars: int) -> Iterator[tuple[str, list[UpgradableHost]]]:
    """The URL of a gateway, and its hosts, those of the PD cluster first."""
    hosts: list[UpgradableHost] = []
    try:
        for cluster, accelerator, count in ((HOME, "h20", homes), (FAR, "h200", fars)):
            for number in range(count):
                name = f"{cluster}{number}"
                hosts.append(UpgradableHost(folder / name, name, accelerator))
        raw = msgspec.to_builtins(written_for(hosts[:homes], hosts[homes:]))
        raw["gateway"] = {"port": 0}
        gateway = Process(
            *("gateway", str(written(raw, folder / "deployment.toml"))),
            *("--record", str(folder / "decisions")),
        )
        try:
            url = gateway.ready(GatewayReady).http
            wait_until(lambda: len(in_use(url, OLD)) == len(hosts), within_s=START_S)
            yield url, hosts
        finally:
            assert gateway.stop() == 0
        assert "incompatible" not in gateway.output
    finally:
        for host in hosts:
            host.close()


def written_for(home: Sequence[Host], far: Sequence[Host]) -> Any:
    nodes = [[{"url": h.url, "kvd_url": h.kvd_url} for h in hosts] for hosts in (home, far)]
    made = deployment(nodes[0], nodes[1] or nodes[0])
    if far:
        return made
    clusters = [cluster for cluster in made.clusters if cluster.name == HOME]
    return msgspec.structs.replace(made, clusters=clusters, links=[])


# In this order there are sets of every kind: one PD node alone, a PrfaaS node with one PD node,
# nodes of one role only.
@pytest.mark.parametrize(("homes", "order"), [(3, (0, 3, 1, 4, 2)), (5, (0, 1, 2, 3, 4))])
def test_a_rolling_upgrade_of_five_nodes_fails_no_request(
    tmp_path: Path, homes: int, order: tuple[int, ...]
) -> None:
    with deployed(tmp_path, homes, 5 - homes) as (url, hosts):
        expected = {
            (tokens, seed, length): hosts[0].complete(
                prompt(tokens, seed), max_tokens=length, ignore_eos=True
            )["choices"][0]["token_ids"]
            for tokens, length in ASKED
            for seed in range(4)
        }
        before = state(url)
        watch = Watch(url, expected)
        with watch.running():
            for number, place in enumerate(order):
                asked = watch.answered
                wait_until(lambda asked=asked: watch.answered >= asked + 12)  # type: ignore[misc]
                hosts[place].upgrade()
                upgraded = {hosts[at].name for at in order[: number + 1]}
                wait_until(lambda wanted=upgraded: in_use(url, NEW) == wanted)  # type: ignore[misc]
            asked = watch.answered
            wait_until(lambda: watch.answered >= asked + 12)
        after = state(url)
    assert watch.problems == []
    assert min(len(seen.revisions) for seen in watch.polls) >= 4
    assert [seen.unexplained for seen in watch.polls if seen.unexplained] == []
    assert max(seen.formats for seen in watch.polls) == 2 and watch.polls[-1].formats == 1
    assert roles(after) == roles(before) and after["conversions"] == []
    assert after["retries"]["denied"] == 0
    check_hand_offs(tmp_path / "decisions", watch)


def check_hand_offs(decisions: Path, watch: Watch) -> None:
    """Every hand-off was between nodes of one revision, and both revisions had some."""
    found = set()
    for line in decisions.read_bytes().splitlines():
        decision = json.loads(line)
        route = decision["route"]
        if route is None or route[1] == route[2]:
            continue
        revisions = {watch.revision(node, decision["now_s"]) for node in route[1:3]} - {None}
        assert len(revisions) <= 1, (route, revisions)
        found |= revisions
    assert found == {f"bytes x {float(scale):g}" for scale in (OLD, NEW)}
