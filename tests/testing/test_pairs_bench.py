"""What `bench/pairs.py` makes of hand-offs that it has seen. `tests/vllm` runs it."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from prfaas.errors import InputError
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from prfaas.studies.pair_verdict import whole_block_bytes
from prfaas_lab.testing.vllm_configurations import SERVED_MODELS
from tests.benches import bench
from tests.waiting import wait_until

pairs = bench("pairs")
SPEC = KVSpec((FullAttention("full0", (0, 1), 10), LinearState("linear0", (2,), 100)))


def answer(*tokens: int, logprobs: list[float] | None = None) -> Any:
    return pairs.Answer(list(tokens), logprobs)


def test_names_of_pairs() -> None:
    assert pairs.parse_pair("node:tp2") == ("node", "tp2")
    assert pairs.parse_pair("tp1:tp1") == ("tp1", "tp1#2")  # twins are two engines
    for wrong, says in (("node", "not a pair"), ("node:tp9", "unknown configuration 'tp9'")):
        with pytest.raises(InputError, match=says):
            pairs.parse_pair(wrong)


def test_the_default_pairs_start_each_server_once() -> None:
    """At most two vLLM servers run at once, and those of the previous pair stay."""
    running: set[str] = set()
    started: list[str] = []
    for pair in map(pairs.parse_pair, pairs.PAIRS):
        wanted = set(pair) - {"node"}
        started += wanted - running
        running = wanted
    assert sorted(started) == sorted(set(started))
    assert {"tp1", "tp2", "tp4", "pp2", "b64", "b256"} <= set(started)


def test_lengths_are_checked() -> None:
    assert pairs.parse_lengths("2, 65", pairs.MOST_TOKENS) == (2, 65)
    for wrong in ("", "1", "x", "2048", "65,,2"):
        with pytest.raises(InputError, match="--lengths"):
            pairs.parse_lengths(wrong, pairs.MOST_TOKENS)
    given = ",".join(map(str, pairs.LENGTHS))
    assert pairs.parse_lengths(given, pairs.MOST_TOKENS) == pairs.LENGTHS


def test_bytes_of_each_form() -> None:
    wire = pairs.Wire("canonical", SPEC, 64)
    assert wire.nbytes(130, {}) == SPEC.kv_bytes(130) == 2 * 130 * 10 + 100
    assert wire.nbytes(130, {"full0": 64}) == SPEC.kv_bytes(130, 64)
    native = pairs.Wire("native", SPEC, 64)
    assert native.nbytes(130, {}) == whole_block_bytes(SPEC, 130, 64) > SPEC.kv_bytes(130)


def test_other_tokens_are_a_failure() -> None:
    tally = pairs.Tally()
    tally.judge_tokens("one", answer(1, 2), answer(1, 2), answer(1, 2))
    tally.judge_tokens("two", answer(1, 2), answer(1, 3), answer(1, 2))
    found = tally.as_dict()
    assert (found["tried"], found["tokens_equal"], found["tokens_equal_node"]) == (2, 1, 2)
    assert found["failures"] == ["two: tokens differ from the receiver's at 1"]


@pytest.mark.parametrize(("difference", "fails"), [(0.001, 0), (0.003, 1), (math.nan, 1)])
def test_other_log_probabilities_are_a_failure(difference: float, fails: int) -> None:
    tally = pairs.Tally()
    found, own = answer(1, 2, logprobs=[-1.0, -2.0 + difference]), answer(1, 2, logprobs=[-1.0, -2])
    tally.judge_tokens("one", found, own, own)
    assert len(tally.failures) == fails
    json.dumps(tally.as_dict(), allow_nan=False)


def test_an_engine_without_log_probabilities_is_judged_by_tokens() -> None:
    tally = pairs.Tally()
    tally.judge_tokens("one", answer(1), answer(1), answer(1))
    assert tally.logprob_difference is None and not tally.failures


def test_other_bytes_are_a_failure() -> None:
    tally = pairs.Tally()
    tally.judge_bytes("one", 10, 10)
    tally.judge_bytes("two", 12, 10)
    tally.judge_bytes("three", None, 10)
    assert tally.bytes_equal == 1 and len(tally.failures) == 2
    assert tally.failures[0] == "two: 12 bytes were sent instead of 10"


def test_one_hand_offs_failure_is_recorded_and_the_others_go_on() -> None:
    tally = pairs.Tally()
    for error in (InputError("refused"), pairs.Failed("HTTP 500"), TimeoutError()):
        assert not tally.is_hopeless
        with tally.attempt("one"):
            raise error
    assert [line.split(":")[1].strip() for line in tally.failures] == [
        "InputError",
        "Failed",
        "TimeoutError",
    ]
    assert tally.tried == 3 and tally.is_hopeless  # the rest would take minutes each
    with tally.attempt("two"):
        tally.fail("wrong tokens")
    assert not tally.is_hopeless
    with pytest.raises(KeyboardInterrupt), tally.attempt("three"):
        raise KeyboardInterrupt


def direction(target_is_vllm: bool, arch: str) -> Any:
    source, target = (
        pairs.Engine(name, "", "", is_vllm, Path(), None)
        for name, is_vllm in (("a", False), ("b", target_is_vllm))
    )
    wire = pairs.Wire("canonical", SPEC, 64)
    return pairs.Direction(source, target, source, SERVED_MODELS[arch], wire, pairs.Answers())


def test_where_prompts_are_handed_over() -> None:
    ordinary = direction(True, "falcon-h1")
    assert ordinary._handoff_lengths(130, "both") == [129, 128]
    assert ordinary._handoff_lengths(129, "both") == [128]
    assert ordinary._handoff_lengths(130, "chosen") == [128]
    assert ordinary._handoff_lengths(33, "chosen") == [32]
    # vLLM's MLA on a CPU computes no prompt after a state; the node does.
    assert direction(True, "deepseek-v3")._handoff_lengths(130, "both") == [129]
    assert direction(True, "deepseek-v3")._handoff_lengths(130, "chosen") == []
    assert direction(False, "deepseek-v3")._handoff_lengths(130, "both") == [129, 128]


def test_a_machine_without_memory_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rack = sys.modules["_engine_rack"]
    monkeypatch.setattr(rack, "available_bytes", lambda: 1 << 30)
    monkeypatch.setattr(rack, "MEMORY_S", 0.0)
    rack.await_memory(1 << 30, "tp1")
    with pytest.raises(pairs.Failed, match="tp4 needs about 6 GiB of memory"):
        rack.await_memory(6 << 30, "tp4")


def test_the_end_of_a_process_ends_its_session(tmp_path: Path) -> None:
    """A vLLM server leaves workers behind when its first process dies."""
    script = (
        "import subprocess, sys, time; print(subprocess.Popen(['sleep', '600']).pid, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{script}; time.sleep(600)"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    worker = int(process.stdout.readline())
    sys.modules["_engine_rack"].end(process)
    process.stdout.close()
    assert process.returncode == -signal.SIGTERM
    wait_until(lambda: not _runs(worker))


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"  # an orphan that its new parent has not waited for yet
