"""A rolling upgrade under load: nodes restart with another KV format, one after the other.

Every process is a real one. The new format is a new model revision of the emulated engine: its
state has another size (`node.emulated.byte_scale`), which its revision names.
"""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec
import pytest

from tests.gateway.backends import HOME, MODEL, THRESHOLD, deployment, prompt
from tests.gateway.conftest import QUICK
from tests.gateway.processes import gateway_process
from tests.node.hosts import START_S, Host, Process, call
from tests.waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * START_S)]

REVISIONS = ("1e-4", "1.1e-4", "1.2e-4")  # scales of the state
# The third asks for so many tokens that some of its streams run at a node when it drains.
ASKED = ((THRESHOLD // 4, 20), (2 * THRESHOLD, 20), (THRESHOLD // 4, 400))


PROMPTS = 4  # of each length
Expected: TypeAlias = dict[tuple[int, int, int], list[int]]  # by length, seed and answer's length


class UpgradableHost(Host):
    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        super().__init__(folder, self._with(REVISIONS[0]), ("--node", name))

    def _with(self, scale: str) -> tuple[str, ...]:
        options = (*QUICK, "--accelerator", "h20")
        return (*options, "--set", f"node.emulated.byte_scale={scale}")

    def upgrade(self, scale: str) -> None:
        """SIGTERM, and the same host again at the same addresses, with the new revision."""
        port = urlsplit(self.url).port
        assert self.node.stop() == 0 and self.kvd.stop() == 0
        self._node_options = (*self._with(scale), "--port", str(port))
        self.start_kvd()
        self.begin_node()
        self.wait_until_ready()


@dataclass(slots=True)
class Seen:
    """One poll of the gateway's state."""

    at_s: float
    revisions: dict[str, str]  # by node, of those in use
    unexplained: list[str]  # nodes that are not in use, without a reason
    sets: int


@dataclass(slots=True)
class Watch:
    """Clients and a poller, each with its thread, until the block ends."""

    url: str
    expected: Expected
    answered: int = 0
    problems: list[str] = field(default_factory=list)
    polls: list[Seen] = field(default_factory=list)
    times: dict[str, tuple[float, float]] = field(default_factory=dict)  # of requests, by id
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

    def wait_for_answers(self, number: int) -> None:
        before = self.answered
        wait_until(lambda: self.answered >= before + number)

    def wait_until_in_use(self, scale: str, nodes: set[str]) -> None:
        """The nodes of this revision are in use, and no other node has it."""

        def found() -> set[str]:
            revisions = self.polls[-1].revisions if self.polls else {}
            return {node for node, one in revisions.items() if one == revision(scale)}

        wait_until(lambda: found() == nodes)

    def _ask(self, client: int) -> None:
        number = 0
        while not self._over.is_set():
            tokens, length = ASKED[client % len(ASKED)]
            question = (tokens, number % PROMPTS, length)
            number += 1
            name, begun_s = f"client{client}-{number}", time.monotonic()
            try:
                found = streamed_tokens(self.url, name, prompt(*question[:2]), length)
            except (OSError, AssertionError) as error:
                found = []
                self.problems.append(f"{question}: {describe(error)}")
            if found and found != self.expected[question]:
                self.problems.append(f"{question}: {len(found)} tokens, and not the right ones")
            self.times[name] = (begun_s, time.monotonic())
            self.answered += 1
            self._over.wait(0.05)  # the processes under test have two cores

    def _poll(self) -> None:
        while not self._over.wait(0.1):
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

    def revision(self, node: str, begun_s: float, ended_s: float) -> str | None:
        """What the node had for all of this time; None where it has restarted."""
        before = [seen for seen in self.polls if seen.at_s <= begun_s][-1:]
        during = [seen for seen in self.polls if begun_s < seen.at_s <= ended_s]
        after = [seen for seen in self.polls if seen.at_s > ended_s][:1]
        found = {seen.revisions.get(node) for seen in before + during + after}
        return found.pop() if len(found) == 1 else None


def describe(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        with error:
            return f"{error.code} {error.read().decode()}"
    return repr(error)


def streamed_tokens(url: str, name: str, ids: list[int], max_tokens: int) -> list[int]:
    body = {"model": MODEL, "prompt": ids, "max_tokens": max_tokens, "temperature": 0.0}
    body |= {"ignore_eos": True, "return_token_ids": True, "stream": True}
    headers = {"Content-Type": "application/json", "X-Request-Id": name}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
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


def in_use(url: str, scale: str) -> set[str]:
    nodes = [n for cluster in state(url)["clusters"] for n in cluster["nodes"] if n.get("in_use")]
    return {n["node"] for n in nodes if n["format"]["revision"] == revision(scale)}


def revision(scale: str) -> str:
    return f"bytes x {float(scale):g}"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[UpgradableHost]]:
    folder = tmp_path_factory.mktemp("hosts")
    made: list[UpgradableHost] = []
    try:
        made.extend(UpgradableHost(folder / f"n{number}", f"n{number}") for number in range(5))
        yield made
    finally:
        for host in made:
            host.close()


@pytest.fixture(scope="module")
def expected(hosts: list[UpgradableHost]) -> Expected:
    return {
        (tokens, seed, length): hosts[0].complete(
            prompt(tokens, seed), max_tokens=length, ignore_eos=True
        )["choices"][0]["token_ids"]
        for tokens, length in ASKED
        for seed in range(PROMPTS)
    }


@contextmanager
def gateway(folder: Path, hosts: Sequence[Host], homes: int) -> Iterator[tuple[Process, str]]:
    """A gateway over these hosts, those of the PD cluster first, and its URL."""
    nodes = [{"url": host.url, "kvd_url": host.kvd_url} for host in hosts]
    made = deployment(nodes[:homes], nodes[homes:] or nodes)
    if homes == len(hosts):
        clusters = [cluster for cluster in made.clusters if cluster.name == HOME]
        made = msgspec.structs.replace(made, clusters=clusters, links=[])
    with gateway_process(folder, made) as process:
        yield process, process.url
        assert process.stop() == 0
    assert "incompatible" not in process.output


# In the first order there are sets of every kind: one PD node alone, a PrfaaS node with one PD
# node, nodes of one role only. In the second, the only prefill node is the first to restart.
@pytest.mark.parametrize(
    ("homes", "order", "old", "new"),
    [
        pytest.param(3, (0, 3, 1, 4, 2), *REVISIONS[:2], id="three PD and two PrfaaS nodes"),
        pytest.param(
            5, (0, 1, 2, 3, 4), *REVISIONS[1:], id="five PD nodes", marks=pytest.mark.grid
        ),
    ],
)
def test_a_rolling_upgrade_of_five_nodes_fails_no_request(
    hosts: list[UpgradableHost],
    expected: Expected,
    tmp_path: Path,
    homes: int,
    order: tuple[int, ...],
    old: str,
    new: str,
) -> None:
    with gateway(tmp_path, hosts, homes) as (process, url):
        wait_until(lambda: len(in_use(url, old)) == len(hosts), within_s=START_S)
        before = state(url)
        watch = Watch(url, expected)
        with watch.running():
            for number, place in enumerate(order):
                watch.wait_for_answers(12)
                hosts[place].upgrade(new)
                watch.wait_until_in_use(new, {hosts[at].name for at in order[: number + 1]})
            watch.wait_for_answers(12)
        after = state(url)
    assert watch.problems == []
    assert min(len(seen.revisions) for seen in watch.polls) >= 4
    assert [seen.unexplained for seen in watch.polls if seen.unexplained] == []
    assert max(seen.sets for seen in watch.polls) == 2 and watch.polls[-1].sets == 1
    assert roles(after) == roles(before) and after["conversions"] == []
    assert after["retries"]["denied"] == 0
    assert handed_off(process.output, watch) == {revision(old), revision(new)}


def handed_off(log: str, watch: Watch) -> set[str]:
    """The revisions of the hand-offs, each of which was between nodes of the same one."""
    found: set[str] = set()
    for line in re.findall(r"(?m)prfaas\.gateway\.requests (\{.*)$", log):
        request = json.loads(line)
        nodes = {request.get("prefill"), request.get("decode")} - {None, ""}
        if len(nodes) < 2 or request["id"] not in watch.times:
            continue
        both = [watch.revision(node, *watch.times[request["id"]]) for node in nodes]
        known = {one for one in both if one is not None}
        assert len(known) <= 1, (request, known)
        found |= known
    return found
