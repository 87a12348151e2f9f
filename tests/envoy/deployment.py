"""A deployment as operators put it behind a proxy: one prefill and one decode host at home, one
PrfaaS host, and two gateways with TLS, API keys and an operator key. The engines are held
(`held_node.py`)."""

from __future__ import annotations

import json
import re
import signal
import socket
import ssl
import threading
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from prfaas.contracts.readiness import GatewayReady
from prfaas.launch.request_outcomes import RequestOutcome, parse_outcome
from prfaas.security.certificates import CertificateAuthority
from prfaas.security.tls import trust_context
from tests.envoy.held_node import JOURNAL, SOCKET
from tests.gateway.backends import deployment, node, written
from tests.gateway.conftest import KEEPS, QUICK
from tests.node.hosts import Host, Process
from tests.secret_files import write_secret
from tests.waiting import wait_until

TENANT_KEY, OPERATOR_KEY = "sk-behind-envoy", "the-operator-key-behind-envoy"
GATEWAYS = ("gateway-a", "gateway-b")  # the first one plans
CERTIFICATE_DAYS = 30
ASK_S = 30.0


class HeldHost:
    """A host whose engine is held."""

    def __init__(self, folder: Path, accelerator: str, name: str) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        self.host = Host(
            folder,
            (*QUICK, "--accelerator", accelerator),
            ("--node", name, *KEEPS),
            ("tests.envoy.held_node", str(folder)),
        )
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def connect(self) -> None:
        self.host.wait_until_ready()
        self._control = socket.socket(socket.AF_UNIX)
        self._control.connect(str(self._folder / SOCKET))

    def allow(self, number: int, tokens: int) -> None:
        assert self._control is not None
        with self._lock:
            self._control.sendall(f"{number} {tokens}\n".encode())

    def journal(self) -> list[str]:
        return (self._folder / JOURNAL).read_text().splitlines()

    def held_pages(self) -> int:
        """Pages of the kvd that a lease holds, which cannot be evicted."""
        occupancy = self.host.stats(check=False)["pool"]["occupancy"]
        held: int = occupancy["used_pages"] - occupancy["idle_pages"]
        return held

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        self.host.close()


class Gateway:
    """One `prfaas gateway`, which can be killed, and started again at its old address."""

    def __init__(self, name: str, file: Path, trust: ssl.SSLContext) -> None:
        self.name = name
        self._file = file
        self._trust = trust
        self._ended: list[str] = []  # the output of earlier processes
        self._options: tuple[str, ...] = ()
        self.port = 0
        self.start()

    def start(self, *options: str) -> None:
        port = ("--port", str(self.port))
        self.process = Process("gateway", str(self._file), "--advise", *port, *options)
        self._options = options

    def use(self, *options: str) -> None:
        """Goes on with these options."""
        if self.process.popen.poll() is None and options == self._options:
            return
        if self.process.popen.poll() is None:
            self.kill()
        self.start(*options)
        self.wait_until_ready()

    def wait_until_ready(self) -> None:
        """It listens, and uses every node."""
        url = self.process.ready(GatewayReady).http
        self.port = int(url.rpartition(":")[2])
        wait_until(self._uses_every_node)

    def _uses_every_node(self) -> bool:
        return all(self.nodes_in_use())

    def nodes_in_use(self) -> list[bool]:
        clusters = self.get("/prfaas/v1/state")["clusters"]
        return [bool(found.get("in_use")) for one in clusters for found in one["nodes"]]

    def get(self, path: str) -> Any:
        """Asked directly, as an operator does."""
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}",
            headers={"Authorization": f"Bearer {OPERATOR_KEY}"},
        )
        with urllib.request.urlopen(request, timeout=ASK_S, context=self._trust) as answer:
            return json.load(answer)

    def kill(self) -> None:
        """As a crash does."""
        self.process.kill()
        self._ended.append(self.process.output)

    def wait_until_ended(self) -> int:
        """After it was told to stop."""
        code = self.process.wait()
        self._ended.append(self.process.output)
        return code

    def in_flight(self) -> int:
        requests: int = self.get("/prfaas/v1/state")["requests"]["in_flight"]
        return requests

    def outcomes(self) -> list[RequestOutcome]:
        """A line for every request that has ended here."""
        output = [] if self.process.popen.poll() is not None else [self.process.output]
        text = "".join([*self._ended, *output])
        found = map(parse_outcome, re.findall(r"^.*\{\"id\":.*$", text, re.M))
        return [outcome for outcome in found if outcome is not None]

    def close(self) -> None:
        if self.process.popen.poll() is None:
            self.process.kill()


class Behind:
    """Everything behind the proxy."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.hosts: list[HeldHost] = []
        self.gateways: list[Gateway] = []
        self.ca = folder / "ca.pem"
        self.allowed: Counter[int] = Counter()  # tokens, by the number of the request

    def start(self) -> None:
        authority = CertificateAuthority.new()
        self.ca.write_bytes(authority.pem)
        for name in (*GATEWAYS, "proxy"):
            host = f"{name}.example.net"
            issued = authority.issue(host, CERTIFICATE_DAYS)
            (self.folder / f"{name}.pem").write_bytes(issued.pem)
            write_secret(self.folder / f"{name}.key", issued.key_pem)
        self.trust = trust_context(self.ca)
        for name, accelerator in (("home0", "h20"), ("home1", "h20"), ("far0", "h200")):
            self.hosts.append(HeldHost(self.folder / name, accelerator, name))
        for held in self.hosts:
            held.connect()
        *home, far = [node(held.host) for held in self.hosts]
        raw = msgspec.to_builtins(deployment(home, [far]))
        write_secret(self.folder / "operator.key", f"{OPERATOR_KEY}\n")
        for name in GATEWAYS:
            section = {
                "plans": name == GATEWAYS[0],
                "operator_key_file": "operator.key",
                "keys": [{"key": TENANT_KEY, "tenant": "test"}],
                "tls": {"ca": "ca.pem", "cert": f"{name}.pem", "key": f"{name}.key"},
            }
            file = written({**raw, "gateway": section}, self.folder / f"{name}.toml")
            self.gateways.append(Gateway(name, file, self.trust))
        for gateway in self.gateways:
            gateway.wait_until_ready()

    def close(self) -> None:
        for gateway in self.gateways:
            gateway.close()
        for held in self.hosts:
            held.close()

    # Requests -------------------------------------------------------------------------------------

    def allow(self, number: int, tokens: int = 1) -> None:
        """The request may have so many more tokens, wherever it is decoded."""
        self.allowed[number] += tokens
        for held in self.hosts:
            held.allow(number, tokens)

    def jobs(self, kind: str, number: int) -> int:
        """How often an engine has begun to prefill or decode the request."""
        line = f"{kind} {number}"
        return sum(held.journal().count(line) for held in self.hosts)

    def gateway_of(self, number: int) -> Gateway:
        """The only gateway with a request in flight, which an engine has begun to decode."""
        wait_until(lambda: self.jobs("decode", number) == 1)
        (found,) = [gateway for gateway in self.gateways if gateway.in_flight()]
        return found

    def other(self, gateway: Gateway) -> Gateway:
        (found,) = [one for one in self.gateways if one is not gateway]
        return found

    def lines(self, identity: str) -> list[RequestOutcome]:
        """Of the logs of all gateways."""
        found = [outcome for gateway in self.gateways for outcome in gateway.outcomes()]
        return [outcome for outcome in found if outcome.id == identity]

    @contextmanager
    def no_node(self) -> Iterator[None]:
        """Nodes are silent, and every gateway knows it. Afterwards all are used again."""
        nodes = [held.host.node.popen for held in self.hosts]
        try:
            for process in nodes:
                process.send_signal(signal.SIGSTOP)
            for gateway in self.gateways:
                wait_until(lambda one=gateway: not any(one.nodes_in_use()))  # type: ignore[misc]
            yield
        finally:
            for process in nodes:
                process.send_signal(signal.SIGCONT)
            for gateway in self.gateways:
                wait_until(lambda one=gateway: all(one.nodes_in_use()))  # type: ignore[misc]

    def held_pages(self) -> int:
        return sum(held.held_pages() for held in self.hosts)

    def wait_until_idle(self) -> None:
        for held in self.hosts:
            held.host.wait_until_idle()


@contextmanager
def behind(folder: Path) -> Iterator[Behind]:
    running = Behind(folder)
    try:
        running.start()
        yield running
    finally:
        running.close()
