"""Running engines of unlike kinds, each with its kvd, and a gateway between two of them.

For `bench/pairs.py`. Every process ends with the one that started it. At most the node and two vLLM
servers run at once, and none starts without the memory that it needs.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
import msgspec

from prfaas.contracts.kvd_api import KvdReport
from prfaas.contracts.readiness import GatewayReady, KvdReady, NodeReady, Ready, parse_readiness
from prfaas.launch.attached_process import PROGRAM, attached_prefix
from prfaas_lab.testing.vllm_configurations import ServedModel, configuration_named, transfer_config
from prfaas_lab.testing.vllm_server import VllmServer, start_vllm

NODE = "node"
NEW_TOKENS = 24
WIRE_BLOCK_TOKENS = 64
KVD_OPTIONS = ("--memory", "256MiB", "--log-level", "warning")
# On two cores a server of four ranks may need minutes for what an idle machine does in seconds.
PATIENT = ("--set", "kvd.timeouts.grant_s=120", "--set", "kvd.timeouts.dispatch_s=300")
START_S = 480.0
REQUEST_S = 240.0
SETTLE_S = 30.0
STOP_S = 30.0
MEMORY_S = 120.0
# Memory that one process with torch, or with vLLM, takes at most with these models.
PROCESS_BYTES = 1 << 30
POLL_S = 0.2
R = TypeVar("R", bound=Ready)


class Failed(Exception):
    """A step of a pair failed: a result, not the end."""


class NotStarted(Failed):
    """An engine did not start."""


class Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float] | None  # None: the engine reports none


# Processes ----------------------------------------------------------------------------------------


def say(what: str) -> None:
    click.echo(what, err=True)


class Child:
    """A `prfaas` process that ends with this one. Its output goes to a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with log.open("wb") as out:  # a log of an earlier run has the readiness of another process
            self._process = subprocess.Popen(
                [*attached_prefix(), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env=environment,
                start_new_session=True,
            )

    def ready(self, kind: type[R]) -> R:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            over = self._process.poll() is not None
            for line in self._log.read_text(errors="replace").splitlines():
                if (message := parse_readiness(line, kind)) is not None:
                    return message
            if over:
                break
            time.sleep(POLL_S)
        raise NotStarted(f"{self._log.stem} did not start: {last_errors(self._log)}")

    def stop(self) -> None:
        """At once: what it holds is not used again."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(STOP_S)


def end(process: subprocess.Popen[Any]) -> None:
    """Ends a process, which may clean up, and then all others of its session."""
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)


def last_errors(log: Path) -> str:
    """The last lines of a log that name an error, or its last lines."""
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    named = [
        line.strip()[-300:]
        for line in lines
        if ("Error: " in line or "error: " in line) and "WARNING" not in line
    ]
    return " | ".join(named[-3:] or [line[-200:] for line in lines[-3:]]) or "no output"


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 62


def await_memory(nbytes: int, what: str) -> None:
    """Other processes of the machine may free memory in the meantime. A machine that runs out of
    it would kill some process, perhaps not ours."""
    until_s = time.monotonic() + MEMORY_S
    while available_bytes() < nbytes:
        if time.monotonic() > until_s:
            raise NotStarted(
                f"{what} needs about {nbytes / 2**30:.0f} GiB of memory, and "
                f"{available_bytes() / 2**30:.1f} GiB are available"
            )
        time.sleep(1.0)


@dataclass(slots=True)
class Engine:
    """A running engine with its kvd."""

    name: str
    url: str
    kvd_url: str
    is_vllm: bool
    log: Path
    closing: ExitStack

    @property
    def sampling(self) -> dict[str, Any]:
        return {"ignore_eos": True, **({"logprobs": 0} if self.is_vllm else {})}

    def alone(self, prompt: list[int]) -> Answer:
        """The engine's own answer: an unused salt, so that no cache has the prompt."""
        body = {
            **{"prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0.0},
            **{"return_token_ids": True, "cache_salt": secrets.token_hex(8), **self.sampling},
        }
        return generated(post(f"{self.url}/v1/completions", body))

    def is_alive(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def report(self) -> KvdReport:
        with urllib.request.urlopen(f"{self.kvd_url}/v1/stats?check=1", timeout=30) as answer:
            return msgspec.json.decode(answer.read(), type=KvdReport)

    def is_idle(self) -> bool:
        """The kvd holds no lease and no transfer, and only pages of prefixes."""
        report = self.report()
        busy = [report.incoming.get(key, 0) for key in ("granted", "committed", "attached")]
        busy += [report.outgoing.get("sending", 0), report.held_leases]
        if report.pool is not None:
            occupancy = report.pool.occupancy
            busy += [occupancy.leases, occupancy.used_pages - occupancy.idle_pages]
        return not any(busy)


def post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            found: dict[str, Any] = json.load(answer)
            return found
    except urllib.error.HTTPError as error:
        with error:
            raise Failed(f"HTTP {error.code}: {error.read(500).decode(errors='replace')}") from None
    except OSError as error:
        raise Failed(f"{url}: {error}") from None


def generated(answer: dict[str, Any]) -> Answer:
    (choice,) = answer["choices"]
    return Answer(choice["token_ids"], (choice.get("logprobs") or {}).get("token_logprobs"))


class Rack:
    """The running engines of one model: those of the latest pair, and the node."""

    def __init__(self, python: Path, model: Path, served: ServedModel, form: str) -> None:
        self._python = python
        self._model = model
        self._served = served
        self._form = form
        self._folder = model.parent
        # Paths of sockets have at most about 100 characters.
        self._sockets = tempfile.TemporaryDirectory(prefix="prfaas-")
        self._running: dict[str, Engine] = {}
        self._broken: dict[str, str] = {}
        self._started = 0

    def get(self, wanted: Sequence[str]) -> list[Engine]:
        """The engines of these names. Stops the others, except the node; starts what is missing.
        Raises `NotStarted`, again and at once for an engine that has not started before."""
        for name in [*self._running]:
            if name not in wanted and name != NODE:
                self._stop(name)
        for slot, name in enumerate(wanted):
            if name in self._broken:
                raise NotStarted(self._broken[name])
            if name not in self._running:
                try:
                    self._running[name] = self._start(name, slot)
                except NotStarted as error:
                    self._broken[name] = str(error)
                    raise
        return [self._running[name] for name in wanted]

    def drop_dead(self) -> None:
        """The next pair with an engine that has failed gets a new one."""
        for name, engine in [*self._running.items()]:
            if not engine.is_alive():
                say(f"  {name} is dead: {last_errors(engine.log)}")
                self._stop(name)

    def close(self) -> None:
        for name in [*self._running]:
            self._stop(name)
        self._sockets.cleanup()

    def _stop(self, name: str) -> None:
        self._running.pop(name).closing.close()

    def _start(self, name: str, slot: int) -> Engine:
        say(f"  starting {name}")
        began_s = time.monotonic()
        self._started += 1
        label = f"{name.replace('#', '-')}-{self._started}"
        with ExitStack() as stack:
            socket = Path(self._sockets.name) / f"{self._started}.kvd"
            kvd = Child(
                self._folder / f"{label}-kvd.log",
                *("kvd", "--socket", str(socket), *KVD_OPTIONS, *PATIENT),
            )
            stack.callback(kvd.stop)
            kvd_url = kvd.ready(KvdReady).http
            start = self._node if base(name) == NODE else self._vllm
            log = self._folder / f"{label}.log"
            url = start(name, slot, socket, kvd_url, log, stack)
            engine = Engine(name, url, kvd_url, base(name) != NODE, log, stack.pop_all())
        say(f"  {name} serves after {time.monotonic() - began_s:.0f} s")
        return engine

    def _node(
        self, name: str, slot: int, socket: Path, kvd_url: str, log: Path, stack: ExitStack
    ) -> str:
        await_memory(PROCESS_BYTES, name)
        node = Child(
            log,
            *("node", "--model", str(self._model), "--kvd", str(socket), "--kvd-url", kvd_url),
            *("--port", "0", "--device", "cpu", "--log-level", "warning"),
            *("--set", f"node.block_tokens={WIRE_BLOCK_TOKENS}", "--set", "node.dtype=float32"),
        )
        stack.callback(node.stop)
        return node.ready(NodeReady).http

    def _vllm(
        self, name: str, slot: int, socket: Path, kvd_url: str, log: Path, stack: ExitStack
    ) -> str:
        configuration = configuration_named(base(name))
        await_memory((configuration.workers + 2) * PROCESS_BYTES, name)
        settings = {"form": self._form, "block_tokens": WIRE_BLOCK_TOKENS}
        cores = sorted(os.sched_getaffinity(0))
        log.unlink(missing_ok=True)
        server = start_vllm(
            self._python,
            self._model,
            log,
            core=slot,
            transfer=transfer_config(str(socket), **settings),
            flags=configuration.flags(self._served),
            env=configuration.environment(cores, slot),
            launcher=[*attached_prefix(), PROGRAM],
        )
        stack.callback(end, server.process)
        await_server(server, name, log)
        return server.url


def await_server(server: VllmServer, name: str, log: Path) -> None:
    """Returns when the server is healthy. NotStarted when it has exited, or not in time."""
    until_s = time.monotonic() + START_S
    while not server.healthy():
        if server.process.poll() is not None or time.monotonic() > until_s:
            raise NotStarted(f"{name} did not start: {last_errors(log)}")
        time.sleep(POLL_S)


def base(name: str) -> str:
    """The configuration of an engine's name. The second engine of a pair of twins has `#2`."""
    return name.partition("#")[0]


# A gateway ----------------------------------------------------------------------------------------

# Routing needs a profile. Any profile will do, because the policy offloads every prompt.
GATEWAY_MODEL = "case-study-1t"
_DEPLOYMENT = """
[model]
name = "{model}"
[workload]
kind = "lognormal"
mu = 7.0
sigma = 1.0
min_tokens = 128
max_tokens = 131072
output_tokens = 64
[slo]
output_tokens_per_s = 40
[scheduler]
policy = "remote"
threshold_tokens = 1000
[[clusters]]
name = "home"
kind = "pd"
accelerator = "h20"
gpus = 8
gpus_per_instance = 8
prefill = 0
decode = 1
nodes = [{{ url = "{decode_url}", kvd_url = "{decode_kvd}" }}]
[[clusters]]
name = "far"
kind = "prfaas"
accelerator = "h200"
gpus = 8
gpus_per_instance = 8
nodes = [{{ url = "{prefill_url}", kvd_url = "{prefill_kvd}" }}]
[[links]]
from = "far"
to = "home"
gbps = 10
rtt_ms = 1
"""


@contextmanager
def gateway(source: Engine, target: Engine) -> Iterator[str]:
    """A gateway whose PrfaaS cluster is the source and whose PD cluster is the target. Yields its
    URL when both are in use."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "deployment.toml"
        file.write_text(
            _DEPLOYMENT.format(
                model=GATEWAY_MODEL,
                decode_url=target.url,
                decode_kvd=target.kvd_url,
                prefill_url=source.url,
                prefill_kvd=source.kvd_url,
            )
        )
        child = Child(Path(directory) / "gateway.log", "gateway", str(file), "--port", "0")
        try:
            url = child.ready(GatewayReady).http
            until_s = time.monotonic() + SETTLE_S
            while _in_use(url) < 2:
                if time.monotonic() > until_s:
                    raise Failed("the gateway does not use both nodes")
                time.sleep(POLL_S)
            yield url
        finally:
            child.stop()


def _in_use(url: str) -> int:
    with urllib.request.urlopen(f"{url}/prfaas/v1/state", timeout=30) as answer:
        state = json.load(answer)
    nodes = [node for cluster in state["clusters"] for node in cluster["nodes"]]
    return sum(bool(node.get("in_use")) for node in nodes)
