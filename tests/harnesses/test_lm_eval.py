"""lm-eval's `local-completions` model: the same scores through the gateway as from one engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.commands import program, run_command
from tests.harnesses.system import System, Target, count_outcomes

pytestmark = pytest.mark.timeout(600)
TASKS = Path(__file__).parent / "lm_eval_tasks"
WORDS = "sky blue red green river stone light paper seven count water bridge".split()
QUESTIONS, CHOICES, CONTEXT_WORDS = 6, 3, 40
TOLERANCE = 1e-3  # of a log-likelihood, in float32


def write_questions(path: Path) -> None:
    chosen = random.Random(5)
    questions = [
        {
            "question": f"{' '.join(chosen.choices(WORDS, k=CONTEXT_WORDS))}. Question {number}:",
            "choices": chosen.sample(WORDS, CHOICES),
            "answer": chosen.randrange(CHOICES),
        }
        for number in range(QUESTIONS)
    ]
    path.write_text("".join(json.dumps(question) + "\n" for question in questions))


def evaluate(
    target: Target, task: str, folder: Path, batch_size: int
) -> tuple[dict[str, float], list[Any]]:
    """The scores, and the responses to each question in its order."""
    folder.mkdir()
    write_questions(folder / "questions.jsonl")
    arguments = {
        "model": target.model,
        "base_url": f"{target.url}/v1/completions",
        "tokenizer": target.tokenizer,
        "tokenizer_backend": "huggingface",
        "num_concurrent": 2,
        "max_retries": 1,
    }
    run_command(
        folder,
        *(program(".venv-lm-eval", "lm_eval"), "run", "--model", "local-completions"),
        *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
        *("--tasks", task, "--include_path", str(TASKS), "--batch_size", str(batch_size)),
        *("--output_path", "out", "--log_samples"),
    )
    (results,) = folder.glob("out/*/results_*.json")
    (samples,) = folder.glob("out/*/samples_*.jsonl")
    scores = {
        name: value
        for name, value in json.loads(results.read_text())["results"][task].items()
        if isinstance(value, float | int)
    }
    logged = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(logged) == QUESTIONS
    return scores, [one["resps"] for one in sorted(logged, key=lambda one: int(one["doc_id"]))]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_log_likelihoods(system: System, tmp_path: Path, batch_size: int) -> None:
    """The prompt's log-probabilities (`echo` with `logprobs`) are computed by the decode node."""
    task = "synthetic_multiple_choice"
    expected, single = evaluate(system.single_node, task, tmp_path / "single", batch_size)
    scores, responses = evaluate(system.gateway, task, tmp_path / "gateway", batch_size)
    assert {"acc,none", "acc_norm,none"} <= scores.keys()
    assert scores == expected
    asked = QUESTIONS * CHOICES
    assert sum(len(each) for each in responses) == asked
    for ours, theirs in zip(responses, single, strict=True):
        for (((mine, greedy),),), (((other, other_greedy),),) in zip(
            [[one] for one in ours], [[one] for one in theirs], strict=True
        ):
            assert float(mine) == pytest.approx(float(other), abs=TOLERANCE)
            assert greedy == other_greedy
    routes = count_outcomes(system.new_outcomes(asked))
    assert sum(routes.values()) == asked and {outcome for _, outcome in routes} == {"completed"}


@pytest.mark.parametrize("batch_size", [1, 4])
def test_generated_texts(system: System, tmp_path: Path, batch_size: int) -> None:
    """The prompts are offloaded."""
    task = "synthetic_generation"
    expected, single = evaluate(system.single_node, task, tmp_path / "single", batch_size)
    scores, texts = evaluate(system.gateway, task, tmp_path / "gateway", batch_size)
    assert (scores, texts) == (expected, single)
    assert len({json.dumps(text) for text in texts}) > 1  # they depend on the prompt
    outcomes = system.new_outcomes(QUESTIONS)
    assert count_outcomes(outcomes) == {("remote", "completed"): QUESTIONS}
