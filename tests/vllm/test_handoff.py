"""`prfaas handoff` between two vLLM servers, as an operator types it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.vllm.cases import MAX_TOKENS, WITH_CACHE, Case, boundary, case_id
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(900),  # servers start and stop within it
    pytest.mark.parametrize("case", WITH_CACHE, indirect=True, ids=case_id),
]
TOKENS = 700


def handoff(case: Case, *arguments: str) -> subprocess.CompletedProcess[str]:
    pair = case.pair
    urls = [pair.prefill.url, pair.decode.url]
    urls += ["--prefill-kvd", pair.source.url, "--decode-kvd", pair.target.url]
    command = [sys.executable, "-m", "prfaas", "handoff", *urls, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def story(case: Case, *arguments: str) -> dict[str, Any]:
    done = handoff(case, *arguments, "--compare", "--json")
    assert done.returncode == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["answer"] == told["expected"]
    return told


def test_each_step_is_told_with_its_bytes(case: Case) -> None:
    told = story(case, "--tokens", str(TOKENS), "--max-tokens", str(MAX_TOKENS))
    steps = {step["name"]: step for step in told["steps"]}
    assert list(steps) == ["grant", "prefill", "commit", "decode", "compare"]
    assert told["handoff_tokens"] == boundary(TOKENS)
    assert steps["commit"]["nbytes"] == case.pair.source.handoff_bytes(boundary(TOKENS))
    assert f"{boundary(TOKENS)} prompt tokens cached" in steps["decode"]["note"]
    wait_until(case.pair.nothing_held)


def test_text_under_a_tenants_salt(case: Case) -> None:
    told = story(case, "--prompt", "Once upon a time " * 20, "--salt", "tenant")
    assert told["handoff_tokens"] > 0 and told["text"]
    wait_until(case.pair.nothing_held)


def test_a_refused_prefill_is_one_line_and_leaves_nothing(case: Case) -> None:
    case.pair.restart_source(memory_bytes=2 << 20)
    try:
        refused = handoff(case, "--tokens", "2600", "--seed", "1")
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
        assert "overloaded: " in refused.stderr
        assert not case.pair.target.report().incoming.get("granted")
    finally:
        case.pair.restart_source()
