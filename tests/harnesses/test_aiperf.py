"""NVIDIA's aiperf against the gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harnesses.commands import program, run_command
from tests.harnesses.system import System

pytestmark = pytest.mark.timeout(1800)
REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 200, 8


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_every_request_is_offloaded_and_succeeds(
    system: System, tmp_path: Path, endpoint: str
) -> None:
    # The text of the tiny model's random bytes has other tokens than the answer had, so that only
    # the server's counts are right.
    run_command(
        tmp_path,
        *(program(".venv-aiperf", "aiperf"), "profile", "--url", system.gateway.url),
        *("--model", system.gateway.model, "--tokenizer", str(system.gateway.tokenizer)),
        *("--endpoint-type", endpoint, "--streaming", "--use-server-token-count"),
        *("--synthetic-input-tokens-mean", str(INPUT_TOKENS)),
        *("--output-tokens-mean", str(OUTPUT_TOKENS), "--extra-inputs", "ignore_eos:true"),
        *("--request-count", str(REQUESTS), "--concurrency", "2"),
        *("--ui", "simple", "--artifact-dir", "out"),
        HF_HUB_OFFLINE="",  # with it, aiperf does not read a tokenizer from a folder
    )
    result = json.loads((tmp_path / "out" / "profile_export_aiperf.json").read_text())
    assert result["is_complete"] and not result["was_cancelled"]
    assert result["request_count"]["avg"] == REQUESTS and result["error_summary"] == []
    assert result["total_usage_completion_tokens"]["avg"] == REQUESTS * OUTPUT_TOKENS
    assert system.new_outcomes(REQUESTS) == {("remote", "completed"): REQUESTS}
