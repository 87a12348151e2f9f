"""Hosts as an operator starts them: a kvd process and a node process each; and a gateway's part,
played by hand."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from prfaas.cache.hashing import block_hashes
from prfaas.contracts.kvd_api import GroupShape, OpenTransfer, spec_of
from prfaas.contracts.readiness import KvdReady, NodeReady, Ready, parse_readiness
from prfaas.kvspec import KVSpec
from prfaas.scheduler.handoff import Handoff, choose_handoff
from prfaas.types import Compat
from tests.complaints import ENVIRONMENT, check_output
from tests.waiting import PATIENCE_S, wait_until

# An engine's imports take four seconds of a core; a busy machine may have ten takers for each core.
START_S = 200.0
R = TypeVar("R", bound=Ready)


class Process:
    """One `prfaas` command. Its output is read as it comes, so that it never blocks."""

    def __init__(
        self,
        *arguments: str,
        module: Sequence[str] = ("prfaas",),
        folder: Path | None = None,
    ) -> None:
        """`module`: what Python runs, with arguments of its own before those of the command.
        `folder`: where it runs, if not here."""
        environment = {**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"}
        self.popen = subprocess.Popen(
            [sys.executable, "-m", *module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=folder,
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def output(self) -> str:
        with self._news:
            return "".join(self._lines)

    def find(self, pattern: str) -> str:
        """The first group of the first line that matches; waits for it."""
        found = None

        def told() -> bool:
            nonlocal found
            found = re.search(pattern, "".join(self._lines))
            return found is not None or self._over

        with self._news:
            assert self._news.wait_for(told, START_S), f"no {pattern!r} in: {''.join(self._lines)}"
            assert found is not None, f"it ended: {''.join(self._lines)}"
        return found[1]

    def ready(self, kind: type[R]) -> R:
        """Waits for the announcement of readiness."""
        line = self.find(r'(?m)^(\{"ready":.*)$')
        message = parse_readiness(line, kind)
        assert message is not None, line
        return message

    def kill(self) -> None:
        self.popen.kill()
        self._end()

    def stop(self) -> int:
        """Ends it without a wait for those that send it requests; what runs may finish."""
        self.popen.terminate()
        self.popen.send_signal(signal.SIGINT)
        return self._end()

    def wait(self) -> int:
        """Waits for the end of a process that has been told to stop."""
        return self._end()

    def _end(self) -> int:
        code = self.popen.wait(START_S)
        self._reader.join()
        assert self.popen.stdout is not None
        self.popen.stdout.close()
        check_output(self.output)
        return code

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._over = True
            self._news.notify_all()


# On a busy machine a node with a real model may take longer to start again than a kvd keeps a
# committed transfer by default. Tests of that timeout set it themselves, which wins.
KEEP_COMMITTED = ("--set", "kvd.timeouts.dispatch_s=600")


class Host:
    """A kvd and a node at it. Either may be killed and started again."""

    def __init__(
        self,
        folder: Path,
        node_options: Sequence[str],
        kvd_options: Sequence[str] = (),
        node_module: Sequence[str] = ("prfaas",),
    ) -> None:
        self._socket = str(folder / "kvd.sock")
        self._node_options = node_options
        self._kvd_options = kvd_options
        self._node_module = node_module
        self._addresses: tuple[str, ...] = ()
        folder.mkdir(parents=True, exist_ok=True)
        self.start_kvd()
        self.begin_node()

    def start_kvd(self) -> None:
        """Again at the same addresses, as an operator's has fixed ones."""
        options = (*KEEP_COMMITTED, *self._kvd_options, *self._addresses)
        self.kvd = Process("kvd", "--socket", self._socket, *options)
        ready = self.kvd.ready(KvdReady)
        self.kvd_url = ready.http
        self._addresses = ("--listen", ready.data, "--http", ready.http.removeprefix("http://"))

    def begin_node(self) -> None:
        """Does not wait for it: several start at the same time."""
        self.node = Process(
            *("node", "--kvd", self._socket, "--kvd-url", self.kvd_url, *self._node_options),
            module=self._node_module,
        )
        self._url: str | None = None

    def wait_until_ready(self) -> None:
        self._url = self.node.ready(NodeReady).http

    @property
    def url(self) -> str:
        if self._url is None:
            self.wait_until_ready()
        assert self._url is not None
        return self._url

    def revive(self) -> None:
        """Starts again what is not running."""
        if self.kvd.popen.poll() is not None:
            self.start_kvd()
        if self.node.popen.poll() is not None:
            self.begin_node()
        self.wait_until_ready()

    def close(self) -> None:
        for process in (self.node, self.kvd):
            if process.popen.poll() is None:
                process.kill()

    # Reports --------------------------------------------------------------------------------------

    def complete(self, prompt: Sequence[int] | str, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        status, answer = self.ask(prompt, **fields)
        assert status == 200, answer
        return answer

    def ask(self, prompt: Sequence[int] | str, **fields: Any) -> tuple[int, dict[str, Any]]:
        body = {"prompt": prompt, "temperature": 0.0, "return_token_ids": True, **fields}
        return call("POST", f"{self.url}/v1/completions", body)

    def stats(self, *, check: bool = True) -> dict[str, Any]:
        """Also checks the pool's invariants, unless asked again and again."""
        status, report = call("GET", f"{self.kvd_url}/v1/stats{'?check=1' if check else ''}")
        assert status == 200, report
        return report

    def spec(self) -> KVSpec:
        shapes = msgspec.convert(self.stats()["pool"]["groups"], tuple[GroupShape, ...])
        return spec_of(shapes)

    def received_bytes(self) -> int:
        received: int = self.stats(check=False)["arrivals"]["received_bytes"]
        return received

    def hit_tokens(self) -> int:
        """That the engine has found in its pool instead of computing them, since it started."""
        found = re.search(
            r"^vllm:prefix_cache_hits_total\S* (\S+)$", text_of(f"{self.url}/metrics"), re.M
        )
        assert found is not None
        return int(float(found[1]))

    def wait_until_idle(self, *, within_s: float = PATIENCE_S) -> None:
        """No lease holds a page, nothing is running; every page in use is evictable prefix."""

        def idle() -> bool:
            report = self.stats(check=False)
            occupancy = report["pool"]["occupancy"]
            return (
                occupancy["leases"] == 0
                and occupancy["used_pages"] == occupancy["idle_pages"]
                and report["held_leases"] == 0
                and report["incoming"]["granted"] == report["incoming"]["committed"] == 0
                and report["outgoing"] == {"writing": 0, "sending": 0}
            )

        wait_until(idle, within_s=within_s)
        self.stats()


@contextmanager
def running_hosts(
    folder: Path, node_options: Mapping[str, Sequence[str]], *kvd_options: str
) -> Iterator[list[Host]]:
    """A host of each name, with these options of its node. They start together; all are ready."""
    hosts: list[Host] = []
    try:
        for name, options in node_options.items():
            hosts.append(Host(folder / name, options, ("--node", name, *kvd_options)))
        for host in hosts:
            host.wait_until_ready()
        yield hosts
    finally:
        for host in hosts:
            host.close()


@dataclass(frozen=True, slots=True)
class Granted:
    transfer_id: str
    grant: dict[str, Any]
    prompt: list[int]
    handoff_tokens: int
    salt: str


@dataclass(frozen=True, slots=True)
class Handed:
    tokens: list[int]
    sent_bytes: int
    skip_tokens: int  # what the receiver held of every full-attention group
    handoff_tokens: int
    prefill_cached: int
    decode_cached: int


class Gateway:
    """The steps of design's offloaded request, one by one or all of them."""

    def __init__(self, prefill: Host, decode: Host, block_tokens: int = 64) -> None:
        self.prefill_host = prefill
        self.decode_host = decode
        self.block_tokens = block_tokens

    def open(
        self,
        prompt: list[int],
        *,
        resumable: bool = False,
        salt: str = "",
        length: Handoff | None = None,
    ) -> Granted:
        length = length or choose_handoff(len(prompt), self.block_tokens, resumable=resumable)
        hashes = block_hashes(prompt[: length.handoff_tokens], self.block_tokens, salt=salt)
        compat = msgspec.convert(self.decode_host.stats()["pool"]["compat"], Compat)
        asked = OpenTransfer(tuple(hashes), length.handoff_tokens, compat, length.checkpoint_tokens)
        url = f"{self.decode_host.kvd_url}/v1/open"
        status, grant = call("POST", url, msgspec.to_builtins(asked))
        assert status == 200 and grant["type"] == "grant", grant
        return Granted(grant["transfer_id"], grant, prompt, length.handoff_tokens, salt)

    def prefill(self, granted: Granted) -> tuple[int, dict[str, Any]]:
        return self.prefill_host.ask(
            granted.prompt[: granted.handoff_tokens],
            max_tokens=1,
            cache_salt=granted.salt,
            kv_transfer_params={
                "do_remote_decode": True,
                "grant": granted.grant,
                "handoff_tokens": granted.handoff_tokens,
            },
        )

    def state(self, granted: Granted, wait_s: float = PATIENCE_S) -> str:
        url = f"{self.decode_host.kvd_url}/v1/transfers/{granted.transfer_id}?wait_s={wait_s:g}"
        status, answer = call("GET", url)
        assert status == 200, answer
        state: str = answer["state"]
        return state

    def abort(self, granted: Granted) -> None:
        url = f"{self.decode_host.kvd_url}/v1/transfers/{granted.transfer_id}/abort"
        call("POST", url, {})

    def decode(self, granted: Granted, max_tokens: int) -> tuple[int, dict[str, Any]]:
        return self.decode_host.ask(
            granted.prompt,
            max_tokens=max_tokens,
            cache_salt=granted.salt,
            kv_transfer_params={"do_remote_prefill": True, "transfer_id": granted.transfer_id},
        )

    def hand_off(
        self, prompt: list[int], *, max_tokens: int, resumable: bool = False, salt: str = ""
    ) -> Handed:
        granted = self.open(prompt, resumable=resumable, salt=salt)
        status, prefilled = self.prefill(granted)
        assert status == 200, prefilled
        assert self.state(granted) == "committed"
        status, answer = self.decode(granted, max_tokens)
        assert status == 200, answer
        url = f"{self.prefill_host.kvd_url}/v1/transfers/{granted.transfer_id}"
        status, sent = call("GET", url)
        assert status == 200, sent
        return Handed(
            tokens=tokens_of(answer),
            sent_bytes=sent["nbytes"],
            skip_tokens=min(granted.grant["skip_tokens"].values(), default=0),
            handoff_tokens=granted.handoff_tokens,
            prefill_cached=cached_of(prefilled),
            decode_cached=cached_of(answer),
        )


def tokens_of(answer: dict[str, Any]) -> list[int]:
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def cached_of(answer: dict[str, Any]) -> int:
    cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def call(method: str, url: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    """`key`: without one the request has none."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=2 * PATIENCE_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def text_of(url: str) -> str:
    with urllib.request.urlopen(url, timeout=2 * PATIENCE_S) as answer:
        page: bytes = answer.read()
    return page.decode()
