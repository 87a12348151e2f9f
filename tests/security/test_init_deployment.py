"""A deployment of `prfaas init` serves over mutual TLS, and is closed to all others."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from prfaas.security.shared_key import bearer
from prfaas_lab.testing import netns
from tests.security.deployments import (
    RunningDeployment,
    complete,
    completion,
    init,
    member_context,
    running,
    send,
    wait_until_served,
    write_catalog,
)
from tests.security.probes import assert_nothing_is_open
from tests.waiting import PATIENCE_S

PROMPT = random.Random(7).choices(range(32, 127), k=1500)


def local_answer(deployment: RunningDeployment, name: str) -> list[int]:
    """The tokens of a PD node that prefills by itself, for a host of the deployment."""
    (host,) = [
        host
        for host in deployment.summary["hosts"]
        if any(one["name"] == name for one in host["commands"])
    ]
    (url,) = [
        one["url"] for one in host["commands"] if (one["service"], one["name"]) == ("node", name)
    ]
    folder = Path(host["folder"])
    answer = send(
        url,
        "/v1/completions",
        member_context(folder),
        method="POST",
        body=completion(PROMPT, cache_salt="another"),
        headers=bearer((folder / "member.key").read_text().strip()),
    )
    assert answer is not None and answer.status == 200, answer
    tokens: list[int] = answer.json["choices"][0]["token_ids"]
    return tokens


@pytest.mark.slow  # a whole deployment with TLS, and one more host
def test_the_printed_commands_serve_and_nothing_else_is_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every address of 127.0.0.0/8 is a host. Other test runs use other addresses."""
    net = f"127.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
    summary = init(
        capsys,
        monkeypatch,
        tmp_path / "deploy",
        *("--engine", "emulated", "--model", "toy", "--catalog", write_catalog(tmp_path)),
        *("--pd", f"pd={net}.1,{net}.2", "--prfaas", f"far={net}.11"),
        *("--gateway", f"{net}.9", "--gbps", 10, "--memory", "64MiB", "--policy", "remote"),
    )
    with running(summary, tmp_path) as deployment:
        wait_until_served(deployment, 3)
        tokens, outcome = complete(deployment, PROMPT)
        assert (outcome.route, outcome.prefill) == ("remote", "far-0"), outcome
        assert outcome.decode.startswith("pd-") and outcome.bytes > 0
        assert tokens == local_answer(deployment, outcome.decode)
        assert_nothing_is_open(deployment, tmp_path)
        added = init(capsys, monkeypatch, tmp_path / "deploy", "--add-host", f"far={net}.12")
        with running(added, tmp_path):
            wait_until_served(deployment, 4)  # its kvd registers


# One namespace per host ---------------------------------------------------------------------------

MODEL = "tiny"
HOSTS = {  # the last part of the addresses in each network
    "near-1": 1,
    "near-2": 2,
    "gateway": 9,
    "far": 11,
    "stranger": 66,
}


@contextmanager
def namespaces() -> Iterator[dict[str, str]]:
    """A namespace per host, all on one switch, with an IPv4 and an IPv6 address each."""
    netns.remove_leftovers("prfaas")
    with ExitStack() as stack:
        names = {}
        for host in ("switch", *HOSTS):
            names[host] = f"prfaas-{os.getpid()}-init-{host}"
            stack.callback(netns.remove_namespace, names[host])
            netns.add_namespace(names[host])
        switch = names["switch"]
        netns.command("ip", "-n", switch, "link", "add", "br0", "type", "bridge")
        netns.command("ip", "-n", switch, "link", "set", "br0", "up")
        for host, number in HOSTS.items():
            ip = ("ip", "-n", names[host])
            port = f"port{number}"
            peer = ("peer", "name", port, "netns", switch)
            netns.command(*ip, "link", "add", "eth0", "type", "veth", *peer)
            netns.command("ip", "-n", switch, "link", "set", port, "master", "br0", "up")
            netns.command(*ip, "addr", "add", f"10.214.0.{number}/24", "dev", "eth0")
            netns.command(*ip, "addr", "add", f"fd14::{number}/64", "dev", "eth0", "nodad")
            netns.command(*ip, "link", "set", "eth0", "up")
        yield names


@pytest.mark.grid
@pytest.mark.skipif(netns.why_not() is not None, reason=netns.why_not() or "")
def test_hosts_in_namespaces_serve_a_real_model_and_nothing_else_is_open(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(
        [sys.executable, "-m", "prfaas", "model", "make", tmp_path / MODEL],
        check=True,
        timeout=PATIENCE_S,
        stdout=subprocess.DEVNULL,
    )
    monkeypatch.chdir(tmp_path)
    summary = init(
        capsys,
        monkeypatch,
        *("deploy", "--model", MODEL, "--catalog", write_catalog(tmp_path, MODEL)),
        *("--pd", "pd=10.214.0.1,10.214.0.2", "--prfaas", "far=fd14::11"),
        *("--gateway", "10.214.0.9", "--gbps", 10, "--memory", "64MiB", "--policy", "remote"),
    )
    with namespaces() as names:
        where = {
            "10.214.0.1": names["near-1"],
            "10.214.0.2": names["near-2"],
            "10.214.0.9": names["gateway"],
            "fd14::11": names["far"],
        }
        # `ip netns exec` runs the command in place of itself.
        with running(
            summary, tmp_path, lambda host: ("ip", "netns", "exec", where[host])
        ) as deployment:
            with netns.inside(names["stranger"]):
                wait_until_served(deployment, 3)
                tokens, outcome = complete(deployment, PROMPT)
                assert (outcome.route, outcome.prefill) == ("remote", "far-0"), outcome
                assert outcome.decode.startswith("pd-") and outcome.bytes > 0
                assert tokens == local_answer(deployment, outcome.decode)
                assert_nothing_is_open(deployment, tmp_path)
                if shutil.which("curl"):
                    check_printed_request(summary)


def check_printed_request(summary: dict[str, Any]) -> None:
    """Asserts that the printed command lines for people work."""
    for line, expected in ((summary["request"], "text_completion"), (summary["state"], "far-0")):
        done = subprocess.run(
            ["sh", "-c", f"{line} --silent --show-error --fail-with-body"],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0 and expected in done.stdout, (line, done)
