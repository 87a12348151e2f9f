"""guidellm against the gateway."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.harnesses.commands import program, run_command
from tests.harnesses.system import System

pytestmark = pytest.mark.timeout(1800)
REQUESTS, INPUT_TOKENS, OUTPUT_TOKENS = 6, 200, 8


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/completions"])
def test_every_request_is_offloaded_and_succeeds(
    system: System, tmp_path: Path, endpoint: str
) -> None:
    target, model, tokenizer = system.gateway
    run_command(
        tmp_path,
        *(program(".venv-guidellm", "guidellm"), "run", "--disable-console-interactive"),
        "--backend",
        f"kind=openai_http,target={target},model={model},request_format={endpoint}",
        *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
        "--data",
        f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={OUTPUT_TOKENS}",
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", f"kind=max_requests,count={REQUESTS}"),
        *("--output", "kind=json,path=report.json"),
    )
    (result,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    totals = result["metrics"]["request_totals"]
    assert totals == {
        **{"successful": REQUESTS, "errored": 0, "incomplete": 0},
        "total": REQUESTS,
    }
    assert result["metrics"]["output_token_count"]["successful"]["mean"] == OUTPUT_TOKENS
    assert system.new_outcomes(REQUESTS) == {("remote", "completed"): REQUESTS}
