"""`bench gpu`: parts fail alone, results are written at once, and all parts run on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.benches import FOLDER, bench


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark with parts that are not measured, and without torch."""
    module = bench("gpu")
    monkeypatch.setattr(module, "machine", lambda device: {"device": device})
    return module


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, ModuleType]]:
    made = {}
    for name in ("copies", "prefill", "start", "live", "compare"):
        made[name] = ModuleType(f"_gpu_{name}")
        made[name].measure = lambda options, rack=None: {"measured": True}  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"_gpu_{name}", made[name])
    yield made


def invoke(gpu: Any, *arguments: str) -> Result:
    return CliRunner().invoke(gpu.main, ["--device", "cpu", "--small", *arguments])


def printed(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_part_that_fails_is_reported_and_the_next_ones_run(
    gpu: Any, parts: dict[str, ModuleType], tmp_path: Path
) -> None:
    def fail(options: Any) -> dict[str, Any]:
        options.keep("half", 1)
        raise RuntimeError("first line\n" + "more\n" * 100)

    parts["copies"].measure = fail  # type: ignore[attr-defined]
    result = invoke(gpu, "--out", str(tmp_path / "out.json"))
    assert result.exit_code == 1
    found = printed(result)
    assert found["copies"]["half"] == 1
    assert found["copies"]["error"][0] == "RuntimeError: first line"
    assert len(found["copies"]["error"]) == gpu.ERROR_LINES
    for part in ("prefill", "start", "live", "compare"):
        assert found[part]["measured"] and "error" not in found[part]
    assert json.loads((tmp_path / "out.json").read_text()) == found


def test_a_part_that_cannot_be_imported_fails_alone(
    gpu: Any, parts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "_gpu_copies", None)
    result = invoke(gpu, "--only", "copies", "--only", "live")
    assert result.exit_code == 1
    assert "error" in printed(result)["copies"]
    assert printed(result)["live"]["measured"]


def test_a_case_that_fails_makes_the_exit_code_1(gpu: Any, parts: dict[str, ModuleType]) -> None:
    cases = [{"case": "a", "out_GBps": 50.0}, {"case": "b", "error": "no memory"}]
    parts["copies"].measure = lambda options: {"cases": cases}  # type: ignore[attr-defined]
    assert invoke(gpu, "--only", "copies").exit_code == 1
    del cases[1]["error"]
    assert invoke(gpu, "--only", "copies").exit_code == 0


def test_a_result_is_in_the_file_before_its_part_ends(
    gpu: Any, parts: dict[str, ModuleType], tmp_path: Path
) -> None:
    out, seen = tmp_path / "out.json", []

    def measure(options: Any) -> dict[str, Any]:
        options.keep("early", {"gb_per_s": 50})
        seen.append(json.loads(out.read_text())["copies"])
        return {"late": 2}

    parts["copies"].measure = measure  # type: ignore[attr-defined]
    result = invoke(gpu, "--only", "copies", "--out", str(out))
    assert result.exit_code == 0
    assert seen == [{"early": {"gb_per_s": 50}}]
    assert printed(result)["copies"]["late"] == 2


def test_a_part_after_the_time_is_used_up_does_not_run(
    gpu: Any, parts: dict[str, ModuleType]
) -> None:
    def measure(options: Any) -> dict[str, Any]:
        time.sleep(max(0.0, options.left_s))
        return {}

    parts["copies"].measure = measure  # type: ignore[attr-defined]
    result = invoke(gpu, "--minutes", "0.005", "--only", "copies", "--only", "live")
    assert result.exit_code == 1
    assert "the time is used up" in printed(result)["live"]["error"][0]


def test_minutes_are_checked(gpu: Any) -> None:
    result = invoke(gpu, "--part-minutes", "0")
    assert result.exit_code != 0
    assert "--part-minutes" in str(result.exception)


def test_the_first_token_is_counted_from_the_commit_less_one_step() -> None:
    live = bench("_gpu_live")
    handed = live.Handoff(1000, 24, 2_000_000, 4.0, 4.01, [4.11, 4.15, 4.19, 4.30])
    found = handed.as_dict()
    assert found["commit_after_prefill_ms"] == 10.0
    assert found["first_token_after_commit_ms"] == 100.0
    assert found["decode_step_ms"] == 40.0
    assert found["over_a_step_ms"] == 60.0


def test_tokens_of_a_stream_are_counted_and_its_error_is_raised() -> None:
    live = bench("_gpu_live")
    assert live._tokens(b'data: {"choices":[{"text":"ab","token_ids":[1,2]}]}') == 2
    assert live._tokens(b'data: {"choices":[]}') == 0
    assert live._tokens(b"data: [DONE]") == live._tokens(b"") == 0
    with pytest.raises(Exception, match="broken"):
        live._tokens(b'data: {"error":{"message":"broken"}}')


def test_compared_lengths_are_spread_and_not_round() -> None:
    lengths = bench("_gpu_compare").lengths(20, 200, 20_000)
    assert len(set(lengths)) == 20 and lengths == sorted(lengths)
    assert lengths[0] == 200 and lengths[-1] == 20_019


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({}, ""),
        ({"equal": 1}, "changed the answer"),
        ({"prompts": 3}, "used up"),
        ({"unchanged": False}, "without any damage"),
        ({"changed_numbers": 0}, "no number"),
        ({"changed": True}, "not noticed"),
    ],
)
def test_compare_fails_unless_every_answer_is_as_it_must_be(
    change: dict[str, Any], error: str
) -> None:
    from prfaas.errors import EngineError

    handoffs = [{"prompt_tokens": tokens, "equal": True} for tokens in (100, 200)]
    handoffs[0]["equal"] = "equal" not in change
    results = {
        "handoffs": handoffs,
        "equal": change.get("equal", 2),
        "prompts": change.get("prompts", 2),
        "damaged": {
            "unchanged": {"equal": change.get("unchanged", True)},
            "changed": {"equal": change.get("changed", False)},
            "changed_numbers": change.get("changed_numbers", 16),
        },
    }
    check = bench("_gpu_compare")._check
    if not error:
        check(results)
        return
    with pytest.raises(EngineError, match=error):
        check(results)


def test_a_dropped_file_is_not_in_memory_and_a_read_one_is(tmp_path: Path) -> None:
    models = bench("_gpu_models")
    (tmp_path / "weights").write_bytes(bytes(1 << 20))
    assert models.flush(tmp_path) == 1 << 20
    assert models._resident_pages(tmp_path / "weights") == (256, 256)
    # Some file systems keep pages whatever they are told, so only the range is certain.
    assert 0.0 <= models.drop_from_page_cache(tmp_path) <= 1.0


def test_a_node_that_does_not_start_is_reported_with_its_last_lines(
    tmp_path: Path,
) -> None:
    nodes = bench("_gpu_nodes")
    node = nodes.NodeProcess(["--model", str(tmp_path / "none")], tmp_path / "log")
    try:
        with pytest.raises(Exception, match="ended before it was ready") as raised:
            node.wait_until_ready(60.0)
    finally:
        node.end()
    assert "none" in str(raised.value)
    assert "none" in (tmp_path / "log").read_text()


def test_progress_bars_are_not_news() -> None:
    is_news = bench("_gpu_nodes")._is_news
    lines = ["", "Loading:  50%|##  | 1/2", "Loading: 100%|####| 2/2", "the model is loaded"]
    assert [line for line in lines if is_news(line)] == lines[2:]


def test_phases_are_read_from_the_log() -> None:
    lines = [
        (0.1, "12:00:00 prfaas.engine start: compiled kernels are kept in /x"),
        (3.0, "12:00:03 prfaas.engine start: imported torch and transformers in 2.9 s"),
        (9.0, "12:00:09 prfaas.engine start: loaded the weights onto cuda in 6.0 s"),
    ]
    assert bench("_gpu_nodes").phases(lines) == {
        "imported torch and transformers": 2.9,
        "loaded the weights onto cuda": 6.0,
    }


@pytest.mark.grid
@pytest.mark.timeout(600)
def test_all_parts_run_on_a_cpu_with_tiny_models(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--small"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = SimpleNamespace(**json.loads(done.stdout))
    assert found.copies
    overheads = [case["overhead"] for case in found.prefill.values() if isinstance(case, dict)]
    assert len(overheads) == 2 and all(-1 < overhead for overhead in overheads)
    for start in (found.start["first"], found.start["second"]):
        assert start["ready_s"] > 0
        assert len(start["requests"]["seconds"]) == 10
    assert [run["tokens"] for run in found.live["runs"]] == [576, 599]
    assert [run["left_tokens"] for run in found.live["runs"]] == [24, 1]
    assert all(run["megabytes"] > 0 for run in found.live["runs"])
    assert found.compare["equal"] == found.compare["prompts"] == 4
    assert not found.compare["damaged"]["changed"]["equal"]
