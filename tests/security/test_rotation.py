"""Keys, certificates and the CA of a whole deployment are replaced while it serves."""

from __future__ import annotations

import json
import secrets
import shutil
import signal
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from prfaas.security.tls import client_context
from prfaas_lab.testing.certificates import CertificateSet, make_certificates
from tests.gateway.backends import MODEL, THRESHOLD, deployment, node, prompt
from tests.gateway.conftest import QUICK, on_accelerators
from tests.gateway.processes import gateway_process
from tests.node.hosts import Process, running_hosts
from tests.secret_files import write_secret
from tests.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.grid

CLIENTS = 3
RELOADED = "keys and certificates have been read again"


@dataclass
class Secrets:
    """The files of a deployment, all in one folder; here every process reads the same ones."""

    folder: Path
    cas: tuple[CertificateSet, CertificateSet]
    old: dict[str, str] = field(default_factory=dict)
    new: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("member", "operator", "tenant"):
            self.old[name], self.new[name] = secrets.token_hex(16), secrets.token_hex(16)
        self.write_keys(self.old)
        write_secret(self.folder / "salt.key", secrets.token_hex(32))
        self.trust(self.cas[0])
        self.use(self.cas[0])

    def write_keys(self, *keys: dict[str, str]) -> None:
        for name in self.old:
            lines = "".join(f"{each[name]}\n" for each in keys)
            write_secret(self.folder / f"{name}.key", lines)

    def trust(self, *cas: CertificateSet) -> None:
        (self.folder / "ca.pem").write_text("".join(made.ca.read_text() for made in cas))

    def use(self, made: CertificateSet) -> None:
        for name in ("server.pem", "server.key", "client.pem", "client.key"):
            shutil.copy(made.ca.parent / name, self.folder / name)

    def flags(self, section: str) -> list[str]:
        """Of a kvd or a node."""
        folder = self.folder
        flags = [
            "--member-key-file",
            str(folder / "member.key"),
            "--tls-ca",
            str(folder / "ca.pem"),
        ]
        flags += ["--tls-cert", str(folder / "server.pem"), "--tls-key", str(folder / "server.key")]
        for name in ("cert", "key"):
            path = folder / f"client.{'pem' if name == 'cert' else 'key'}"
            flags += ["--set", f"{section}.tls.client_{name}={path}"]
        return flags

    def gateway(self) -> dict[str, Any]:
        return {
            "port": 0,
            "keys": [{"file": "tenant.key", "tenant": "acme"}],
            "operator_key_file": "operator.key",
            "member_key_file": "member.key",
            "salt_file": "salt.key",
            "tls": {
                **{"ca": "ca.pem", "cert": "server.pem", "key": "server.key"},
                **{"client_cert": "client.pem", "client_key": "client.key"},
            },
        }


class Load:
    """Clients that send one request after the other, short and long ones, each on a new
    connection."""

    def __init__(self, url: str, tls: ssl.SSLContext, keys: Callable[[], str]) -> None:
        self._url = url
        self._tls = tls
        self._key = keys
        self._stop = threading.Event()
        self.served = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(n,)) for n in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            tokens = THRESHOLD * 2 if turn % 2 else THRESHOLD // 4
            body = {"model": MODEL, "prompt": prompt(tokens, seed=100 * turn + number)}
            try:
                answer = post(
                    f"{self._url}/v1/completions", {**body, "max_tokens": 4}, self._key(), self._tls
                )
                assert answer["usage"]["completion_tokens"] == 4, answer
                self.served += 1
            except (OSError, AssertionError) as error:
                reason = error.read().decode() if isinstance(error, urllib.error.HTTPError) else ""
                self.failures.append(f"{error!r} {reason}")

    def wait_for_more(self, requests: int) -> None:
        goal = self.served + requests
        wait_until(lambda: self.served >= goal or bool(self.failures))
        assert not self.failures, self.failures[0]

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def post(url: str, body: Any, key: str, tls: ssl.SSLContext) -> Any:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=PATIENCE_S, context=tls) as answer:
        return json.load(answer)


def get(url: str, key: str, tls: ssl.SSLContext) -> Any:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"})
    with urllib.request.urlopen(request, timeout=PATIENCE_S, context=tls) as answer:
        return json.load(answer)


@dataclass
class Deployed:
    secrets: Secrets
    processes: Sequence[Process]
    url: str
    kvd_urls: Sequence[str]

    def hang_up(self, load: Load) -> None:
        """Each process reads its files again, one after the other; requests are served between
        any two of them."""
        for process in self.processes:
            before = process.output.count(RELOADED)
            process.popen.send_signal(signal.SIGHUP)
            wait_until(lambda: process.output.count(RELOADED) > before)  # noqa: B023
            load.wait_for_more(CLIENTS)


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    cas = (make_certificates(tmp_path / "old"), make_certificates(tmp_path / "new"))
    files = Secrets(tmp_path, cas)
    with ExitStack() as stack:
        options = on_accelerators((*QUICK, *files.flags("node")), home=2)
        hosts = stack.enter_context(running_hosts(tmp_path, options, *files.flags("kvd")))
        made = deployment([node(host) for host in hosts[:2]], [node(hosts[2])])
        gateway = stack.enter_context(gateway_process(tmp_path, made, **files.gateway()))
        processes = [process for host in hosts for process in (host.kvd, host.node)]
        kvds = [host.kvd_url for host in hosts]
        yield Deployed(files, [*processes, gateway], gateway.url, kvds)


def test_everything_is_replaced_under_load_and_no_request_fails(deployed: Deployed) -> None:
    files = deployed.secrets
    old, new = files.cas
    # The client trusts both CAs, as its operator has told it to, and uses its key until the last
    # step but one.
    both = client_context(files.folder / "ca.pem", old.client, old.client_key)
    both.load_verify_locations(cafile=new.ca)
    key = files.old["tenant"]
    state = f"{deployed.url}/prfaas/v1/state"

    def all_in_use() -> bool:
        clusters = get(state, files.old["operator"], both)["clusters"]
        return all(node.get("in_use") for cluster in clusters for node in cluster["nodes"])

    wait_until(all_in_use)
    load = Load(deployed.url, both, lambda: key)
    try:
        load.wait_for_more(CLIENTS)
        for keys in ((files.old, files.new), (files.new, files.old)):
            files.write_keys(*keys)
            deployed.hang_up(load)
        key = files.new["tenant"]
        load.wait_for_more(2 * CLIENTS)  # each client has used the new key
        files.write_keys(files.new)
        deployed.hang_up(load)
        for change in (
            lambda: files.trust(old, new),
            lambda: files.use(new),
            lambda: files.trust(new),
        ):
            change()
            deployed.hang_up(load)
        load.wait_for_more(10 * CLIENTS)
    finally:
        load.stop()
    assert not load.failures
    # What was replaced opens nothing any more.
    fresh = client_context(new.ca, new.client, new.client_key)
    assert get(state, files.new["operator"], fresh)["clusters"]
    for stale in (files.old["operator"], files.old["tenant"], files.old["member"]):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(state, stale, fresh)
        refused.value.close()
        assert refused.value.code == 401
    for url in deployed.kvd_urls:
        assert get(f"{url}/v1/stats", files.new["member"], fresh)["pool"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(f"{url}/v1/stats", files.old["member"], fresh)
        refused.value.close()
        assert refused.value.code == 401
        with pytest.raises(OSError, match=r"(?i)certificate|ssl|reset|closed"):
            get(f"{url}/v1/stats", files.new["member"], both)  # it shows the old certificate
    long = {"model": MODEL, "prompt": prompt(2 * THRESHOLD, seed=1), "max_tokens": 1}
    assert post(f"{deployed.url}/v1/completions", long, files.new["tenant"], fresh)["choices"]
