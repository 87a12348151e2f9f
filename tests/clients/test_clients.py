"""OpenAI's clients in Python and JavaScript make the same calls, and report the same outcomes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.harnesses.system import System, running_system

pytestmark = pytest.mark.timeout(600)
FOLDER = Path(__file__).parent
RUN_S = 200.0  # for all calls of one client; only a hang takes so long
TOLERANCE = 1e-3  # of log-probabilities: the second client finds cached prefixes
Outcomes: TypeAlias = dict[str, Any]  # by the name of the call


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with running_system(tmp_path_factory.mktemp("system")) as started:
        yield started


def run_calls(system: System, *command: str) -> Outcomes:
    arguments = (f"{system.gateway.url}/v1", system.gateway.model, "sk-any")
    done = subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=RUN_S, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["name"]: line["outcome"] for line in lines}


@pytest.fixture(scope="module")
def python(system: System) -> Outcomes:
    return run_calls(system, sys.executable, str(FOLDER / "run_calls.py"))


@pytest.fixture(scope="module")
def javascript(system: System, python: Outcomes) -> Outcomes:
    """After the Python client, so that requests of both do not share batches."""
    assert (FOLDER / "node_modules" / "openai").is_dir(), "`make test-clients` installs the client"
    return run_calls(system, "node", str(FOLDER / "run_calls.mjs"))


def is_close(one: Any, other: Any) -> bool:
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_close, one, other))
    if isinstance(one, float) and isinstance(other, float | int):
        return abs(one - other) <= TOLERANCE
    return bool(one == other)


def test_both_clients_report_the_same(python: Outcomes, javascript: Outcomes) -> None:
    assert list(python) == list(javascript)
    different = [name for name in python if not is_close(python[name], javascript[name])]
    assert not different, [(python[name], javascript[name]) for name in different]


def test_prompts_are_offloaded(system: System, python: Outcomes) -> None:
    answered = [outcome for outcome in python.values() if "choices" in outcome]
    outcomes = system.new_outcomes(len(answered))
    assert outcomes["remote", "completed"] >= len(answered) - 1  # not the prompt's logprobs


def texts(outcome: Any) -> list[str]:
    choices = outcome["choices"]
    return [one["text"] for one in (choices.values() if isinstance(choices, dict) else choices)]


@pytest.mark.parametrize(
    "name",
    ["completion", "several completions", "several prompts", "completion with log-probabilities"],
)
def test_a_stream_has_the_text_of_the_whole_answer(python: Outcomes, name: str) -> None:
    assert texts(python[f"{name}, streamed"]) == texts(python[name])


def test_choices(python: Outcomes) -> None:
    assert len(texts(python["several completions"])) == 3
    assert len(set(texts(python["several completions"]))) > 1  # each has a seed of its own
    assert texts(python["completion"])[0].startswith(texts(python["several prompts"])[0])
    usage = python["several prompts"]["usage"]
    assert usage["completion_tokens"] == 2 * 4
    assert python["several prompts, streamed"]["usage"] == usage
    assert len(texts(python["several chat answers"])) == 2


def test_stop_strings_and_formats(python: Outcomes) -> None:
    (stopped,) = python["completion, stopped by a string"]["choices"]
    assert (stopped["text"], stopped["finish_reason"]) == ("", "stop")
    (formatted,) = texts(python["chat with a format"])
    assert json.loads(formatted)["colour"] in ("red", "blue")


def test_log_probabilities(python: Outcomes) -> None:
    (choice,) = python["echo with log-probabilities"]["choices"]
    first, *others = choice["logprobs"]["token_logprobs"]
    assert first is None and len(others) == len("Once upon a time")  # one answer token
    (chat,) = python["chat with log-probabilities"]["choices"]
    assert [len(token["top_logprobs"]) for token in chat["logprobs"]["content"]] == [2, 2, 2]


@pytest.mark.parametrize(
    ("name", "error", "param"),
    [
        ("unknown model in a path", "NotFoundError", "model"),
        ("unknown model", "NotFoundError", "model"),
        ("too many tokens", "BadRequestError", "max_tokens"),
        ("a wrong type", "BadRequestError", "messages"),
        ("too many alternatives", "BadRequestError", "logprobs"),
        ("an unknown field", "BadRequestError", "no_such_field"),
    ],
)
def test_errors_are_the_clients_exceptions(
    python: Outcomes, name: str, error: str, param: str
) -> None:
    assert (python[name]["error"], python[name]["param"]) == (error, param)
    assert python[name]["message"]


def test_every_other_call_succeeds(python: Outcomes) -> None:
    failed = {name for name, outcome in python.items() if "error" in outcome}
    assert len(failed) == 6, {name: python[name] for name in failed}
