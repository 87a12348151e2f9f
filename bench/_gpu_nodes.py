"""Two `prfaas node` processes with one checkpoint on one device, for several parts of
`bench/gpu.py`.

    NodeRack ── checkpoint (made once) ── node 0 (empty kernel cache) ── node 1 (kernels of node 0)
"""

from __future__ import annotations

import json
import os
import queue
import random
import re
import subprocess
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _gpu_models import (
    HYBRID,
    SMALL_VOCABULARY,
    config_fields,
    drop_from_page_cache,
    make_checkpoint,
)
from _gpu_options import GpuOptions
from prfaas.contracts.readiness import NodeReady, parse_readiness
from prfaas.errors import EngineError
from prfaas.launch.attached_process import attached_prefix

START_S = 300.0  # at most, until a node is ready
REQUEST_S = 120.0
END_S = 20.0
KERNEL_FOLDERS = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")
PHASE = re.compile(r"\bstart: (?P<what>.+) in (?P<seconds>[0-9.]+) s$")
MOST_LINES = 60  # of a node's log before it is ready
LINE_CHARACTERS = 200
LAST_LINES = 8  # of a node's log, in an error


class NodeProcess:
    """One `prfaas node` with its own kvd. All that it prints goes to a file, with the seconds since
    its start before each line."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        self.log = log
        self.url = ""
        self.ready_s = 0.0
        self.early_lines: list[tuple[float, str]] = []  # until it was ready
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._ready: queue.Queue[NodeReady | None] = queue.Queue()
        self._began_s = time.monotonic()
        self._process = subprocess.Popen(
            [*attached_prefix(), "node", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=_environment(),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self, timeout_s: float) -> float:
        """Seconds from the start of the process until it was ready."""
        try:
            ready = self._ready.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise EngineError(self._problem(f"is not ready after {timeout_s:.0f} s")) from None
        if ready is None:
            raise EngineError(self._problem("ended before it was ready"))
        self.url = ready.http
        return self.ready_s

    def begin_to_end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(END_S)
        self._reader.join(END_S)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        known = False
        with self.log.open("w", encoding="utf-8") as log:
            for line in self._process.stdout:
                at_s = time.monotonic() - self._began_s
                text = line.rstrip()
                log.write(f"{at_s:9.3f} {text}\n")
                log.flush()
                self._last.append(text)
                if known:
                    continue
                ready = parse_readiness(text, NodeReady)
                if ready is not None:
                    known, self.ready_s = True, at_s
                    self._ready.put(ready)
                elif _is_news(text) and len(self.early_lines) < MOST_LINES:
                    self.early_lines.append((round(at_s, 2), text[:LINE_CHARACTERS]))
        self._ready.put(None)

    def _problem(self, what: str) -> str:
        return "\n".join([f"the node {what}; its log is {self.log}", *self._last])


def _environment() -> dict[str, str]:
    """Of a node. Its kernels are kept where its configuration says, and nowhere else."""
    kept = {name: value for name, value in os.environ.items() if name not in KERNEL_FOLDERS}
    return {**kept, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}


def phases(lines: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Seconds of the phases that a node has logged, in their order."""
    found = (PHASE.search(line) for _, line in lines)
    return {match["what"]: float(match["seconds"]) for match in found if match is not None}


def _is_news(line: str) -> bool:
    """Whether a line of the log is not one of the many of a progress bar."""
    return bool(line) and ("%|" not in line or "100%|" in line)


class NodeRack:
    """The checkpoint and up to two nodes with it. What a part asks for first is made then, and the
    next part finds it."""

    def __init__(self, options: GpuOptions) -> None:
        """Only device, type, size and folder of the options are used: a rack outlasts a part."""
        self._options = options
        self.directory = options.folder / "checkpoint"
        self._made: dict[str, Any] | None = None
        self._nodes: list[NodeProcess] = []
        self.starts: list[dict[str, Any]] = []  # one for each node

    @property
    def vocabulary(self) -> range:
        """Token ids for prompts. Special tokens, which are the last ones, are left out."""
        small = self._options.small
        fields = config_fields(HYBRID, small=small)
        return range(32, SMALL_VOCABULARY if small else fields["vocab_size"] - 1024)

    def prompt(self, tokens: int, seed: int) -> list[int]:
        return random.Random(seed).choices(self.vocabulary, k=tokens)

    def checkpoint(self) -> dict[str, Any]:
        """What was made, with seconds."""
        if self._made is None:
            self._made = make_checkpoint(self.directory, self._options)
        return self._made

    def nodes(self, count: int, end_s: float) -> list[NodeProcess]:
        """The first `count` nodes, ready, unless they are not until `end_s`."""
        self.checkpoint()
        while len(self._nodes) < count:
            self._start(min(START_S, end_s - time.monotonic()))
        return self._nodes[:count]

    def close(self) -> None:
        for node in self._nodes:
            node.begin_to_end()  # at the same time
        for node in self._nodes:
            node.end()
        self._nodes = []

    def start_another(self, name: str, more: Sequence[str]) -> NodeProcess:
        """Starts one more node with further arguments, without a kvd of its own and without a
        warm-up. The caller waits until it is ready, and ends it."""
        self.checkpoint()
        return self._process(name, [*self._arguments(), "--warm-up", "none", *more])

    def _start(self, timeout_s: float) -> None:
        number = len(self._nodes)
        in_memory = drop_from_page_cache(self.directory)
        memory = "256MiB" if self._options.small else "8GiB"
        node = self._process(str(number), [*self._arguments(), "--", "--memory", memory])
        try:
            ready_s = node.wait_until_ready(timeout_s)
        except BaseException:
            node.end()
            raise
        self._nodes.append(node)
        self.starts.append(
            {
                "node": number,
                "kernels": "kept by the node before" if number else "none kept",
                "checkpoint_in_page_cache": in_memory,
                "ready_s": round(ready_s, 2),
                "phases_s": phases(node.early_lines),
                "log": node.early_lines,
            }
        )

    def _arguments(self) -> list[str]:
        options = self._options
        arguments = ["--model", str(self.directory), "--name", "bench", "--port", "0"]
        arguments += ["--device", options.device, "--set", f"node.dtype={options.dtype}"]
        kernels = f"node.kernel_cache={self._options.folder.absolute() / 'kernels'}"
        return [*arguments, "--set", kernels, "--log-level", "info"]

    def _process(self, name: str, arguments: Sequence[str]) -> NodeProcess:
        folder = self._options.folder
        return NodeProcess(arguments, folder / f"node-{name}.log")


def post(url: str, body: dict[str, Any], timeout_s: float = REQUEST_S) -> dict[str, Any]:
    """The JSON of the response. urllib's errors say what the node has answered."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout_s) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def metrics(url: str) -> dict[str, float]:
    """Sums and counters of a node's /metrics, by name with labels. Buckets are left out."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=REQUEST_S) as answer:
        page = answer.read().decode()
    found = {}
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#") and "_bucket" not in name and "_created" not in name:
            found[name] = float(value)
    return found
