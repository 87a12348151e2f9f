"""`prfaas doctor pair --try` between two vLLM servers, as an operator types it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.vllm.cases import WITH_CACHE, Case, boundary, case_id
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.timeout(900),  # servers start and stop within it
    pytest.mark.parametrize("case", WITH_CACHE, indirect=True, ids=case_id),
]
TOKENS = 700


def hand_off(case: Case, *arguments: str) -> subprocess.CompletedProcess[str]:
    pair = case.pair
    urls = [pair.prefill.url, pair.decode.url]
    urls += ["--kvd-a", pair.source.url, "--kvd-b", pair.target.url]
    command = [sys.executable, "-m", "prfaas", "doctor", "pair", *urls, "--try", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_each_step_is_told_with_its_bytes(case: Case) -> None:
    done = hand_off(case, "--tokens", str(TOKENS), "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)["tried"]
    assert told["answer"] == told["expected"]
    steps = {step["name"]: step for step in told["steps"]}
    assert list(steps) == ["grant", "prefill", "commit", "decode", "compare"]
    assert told["handoff_tokens"] == boundary(TOKENS)
    assert steps["commit"]["nbytes"] == case.pair.source.handoff_bytes(boundary(TOKENS))
    assert f"{boundary(TOKENS)} prompt tokens cached" in steps["decode"]["note"]
    wait_until(case.pair.nothing_held)


def test_a_refused_prefill_is_one_line_and_leaves_nothing(case: Case) -> None:
    case.pair.restart_source(memory_bytes=2 << 20)
    try:
        refused = hand_off(case, "--tokens", "2600")
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1, refused.stderr
        assert "overloaded: " in refused.stderr
        assert not case.pair.target.report().incoming.get("granted")
    finally:
        case.pair.restart_source()
