"""vLLM servers that are started as `prfaas init` prints it: mutual TLS and the member key."""

from __future__ import annotations

import os
import random
import shlex
from pathlib import Path

import pytest

from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.launch.commands import VLLM_MAX_TOKENS
from prfaas.security.tls import trust_context
from tests.security.deployments import (
    complete,
    init,
    member_context,
    running,
    send,
    wait_until_served,
    write_catalog,
)
from tests.vllm.on_a_cpu import SETTINGS, on_a_cpu

PROMPT = random.Random(3).choices(range(32, 127), k=1000)


def in_a_shell(command: str) -> str:
    """`command` as `init` prints it, with variables before the program."""
    before, program, rest = command.partition("vllm serve")
    assert program
    return f"{before}{shlex.join(on_a_cpu(shlex.split(program + rest)))}"


@pytest.mark.timeout(900)  # servers start and stop within it
def test_the_printed_vllm_commands_serve_over_mutual_tls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tmp_path / "falcon"
    make_checkpoint(model, "falcon-h1")
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    net = f"127.{64 + os.getpid() % 64}.{os.getpid() // 64 % 256}"
    summary = init(
        capsys,
        monkeypatch,
        *(tmp_path / "deploy", "--engine", "vllm", "--model", model),
        *("--catalog", write_catalog(tmp_path, "falcon"), "--max-tokens", VLLM_MAX_TOKENS),
        *("--pd", f"pd={net}.1", "--prfaas", f"far={net}.11", "--gbps", 10),
        *("--memory", "256MiB", "--policy", "remote"),
    )
    with running(summary, tmp_path, vllm=in_a_shell) as deployment:
        wait_until_served(deployment, 2)
        tokens, outcome = complete(deployment, PROMPT)
        assert len(tokens) == 8
        assert (outcome.route, outcome.prefill, outcome.decode) == ("remote", "far-0", "pd-0")
        assert outcome.bytes > 0
        stranger = trust_context(deployment.folder / "client" / "ca.pem")
        for host in summary["hosts"]:
            (url,) = [one["url"] for one in host["commands"] if one["service"] == "node"]
            certified = member_context(Path(host["folder"]))
            for path in ("/health", "/metrics", "/v1/models"):
                assert send(url, path, stranger) is None
                assert send(url, path, None) is None
            answer = send(url, "/v1/models", certified)
            assert answer is not None and answer.status == 401
