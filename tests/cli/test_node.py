from __future__ import annotations

import json
import signal
import socket
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas.contracts.readiness import NodeReady
from prfaas.engine.emulated import EmulatedEngine
from prfaas.errors import EngineError
from tests.cli.runner import Result
from tests.node.hosts import Process, call
from tests.secret_files import write_secret
from tests.waiting import PATIENCE_S, wait_until

Run = Callable[..., Result]
EMULATED = ("--engine", "emulated", "--model", "case-study-1t", "--accelerator", "h20")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--model: is required; give it, or node.model in the file"),
        (["--model", "/nowhere"], "/nowhere/tokenizer.json"),
        ([*EMULATED, "--set", "node.emulated.gpus=3"], "8 x h20"),
        (["--engine", "emulated", "--model", "no-such-model"], "no-such-model"),
        ([*EMULATED, "--kvd", "/nowhere/kvd.sock"], "no kvd at /nowhere/kvd.sock"),
        ([*EMULATED, "--kvd", "/nowhere/kvd.sock", "--", "--memory", "1GiB"], "--memory 1GiB"),
        ([*EMULATED, "--set", "node.emulated.byte_scale=0"], "byte_scale: expected `float` > 0"),
        ([*EMULATED, "--set", "node.max_running=100"], "decode steps of up to 20"),
        ([*EMULATED, "--set", "node.tokenizer=."], "tokenizer.json"),
        ([*EMULATED, "--warm-up", "8192,long"], "--warm-up: '8192,long' is not a list of lengths"),
        ([*EMULATED, "--warm-up", "0"], "node.warm_up.0: expected `int` >= 1"),
        ([*EMULATED, "--warm-up", "131073"], "node.warm_up: a prompt of 131073 tokens cannot be"),
    ],
)
def test_what_cannot_be_served_is_one_line(
    prfaas: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    if "--kvd" not in arguments:
        arguments = [*arguments, "--kvd", "/nowhere/kvd.sock"]
    result = prfaas("node", *arguments)
    assert result.code == 2
    assert message in result.err and result.err.count("\n") == 1


def test_a_port_that_is_taken(prfaas: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = prfaas("node", *EMULATED, "--kvd", "/nowhere/kvd.sock", "--port", port)
    assert result.code == 2 and f"127.0.0.1:{port}" in result.err


def test_a_tokenizer_that_is_none(prfaas: Run, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    result = prfaas("node", "--model", str(tmp_path), "--kvd", "/nowhere/kvd.sock")
    assert result.code == 2 and "not a tokenizer" in result.err


def started(*options: str) -> tuple[Process, dict[str, Any]]:
    """A node that starts its kvd, and the description in its model card."""
    node = Process(
        "node",
        *EMULATED,
        "--set",
        "node.emulated.byte_scale=1e-4",
        *options,
        "--",
        "--memory",
        "16MiB",
    )
    url = node.ready(NodeReady).http
    (card,) = call("GET", f"{url}/v1/models")[1]["data"]
    return node, card["prfaas"]


@pytest.mark.parametrize("end", [pytest.param("stop", marks=pytest.mark.slow), "kill"])
def test_a_kvd_of_its_own_ends_with_the_node(end: str) -> None:
    node, card = started()
    assert call("GET", f"{card['kvd_url']}/v1/role")[0] == 200
    getattr(node, end)()

    def gone() -> bool:
        try:
            call("GET", f"{card['kvd_url']}/v1/role")
        except urllib.error.URLError:
            return True
        return False

    wait_until(gone)


def test_a_kvd_that_cannot_start_says_why() -> None:
    node = Process("node", *EMULATED, "--", "--memory", "nonsense")
    assert node.popen.wait(PATIENCE_S) == 2
    node.stop()
    assert "nonsense" in node.output and "the node's kvd did not start" in node.output


@pytest.mark.slow
def test_a_hangup_also_reaches_the_kvd_of_its_own(tmp_path: Path) -> None:
    key = tmp_path / "member.key"
    write_secret(key, "the-first-member-key\n")
    process = Process("node", *EMULATED, "--member-key-file", str(key))
    try:
        url = process.ready(NodeReady).http
        write_secret(key, "another-member-key\n")
        process.popen.send_signal(signal.SIGHUP)
        wait_until(lambda: process.output.count("have been read again") == 2)
        headers = {"Authorization": "Bearer another-member-key"}
        request = urllib.request.Request(f"{url}/v1/models", headers=headers)
        with urllib.request.urlopen(request) as answer:
            kvd_url = json.load(answer)["data"][0]["prfaas"]["kvd_url"]
        with urllib.request.urlopen(
            urllib.request.Request(f"{kvd_url}/v1/stats", headers=headers)
        ) as answer:
            assert json.load(answer)["pool"]
    finally:
        assert process.stop() == 0


def test_a_node_is_ready_after_its_warm_up() -> None:
    node, _ = started("--set", "node.emulated.time_scale=0.001", "--warm-up", "8192,100")
    try:
        begun, done, ready = (
            node.output.index(text)
            for text in ("start: warming up with prompts of 8192, 100", "warmed up with 2", "{")
        )
        assert begun < done < ready
        assert "start: waited for the kvd in" in node.output
        wait_until(lambda: "start: the node is ready after" in node.output)
    finally:
        assert node.stop() == 0


def test_sigterm_during_the_warm_up_ends_node_and_kvd() -> None:
    node = Process(
        "node",
        *EMULATED,
        *("--warm-up", "100000", "--set", "node.emulated.time_scale=100"),
        *("--set", "node.emulated.byte_scale=1e-4", "--", "--memory", "16MiB"),
    )
    wait_until(lambda: "start: warming up" in node.output)
    node.popen.send_signal(signal.SIGTERM)
    assert node.popen.wait(PATIENCE_S) == 0
    node.stop()
    assert "stopping: the node was not ready yet" in node.output
    assert '"ready":"node"' not in node.output and "Traceback" not in node.output


def test_an_engine_that_does_not_work_never_becomes_ready(
    prfaas: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise EngineError("the device has gone")

    monkeypatch.setattr(EmulatedEngine, "submit", fails)
    result = prfaas("node", *EMULATED, "--kvd", "/nowhere/kvd.sock", "--warm-up", "100")
    assert result.code == 2
    assert "cannot serve a prompt of one token: the device has gone" in result.err
