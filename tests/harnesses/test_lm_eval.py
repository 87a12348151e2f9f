"""lm-eval's `local-completions` model: the same scores through the gateway as from one engine."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.harnesses.commands import program, run_command
from tests.harnesses.system import System, Target

pytestmark = pytest.mark.timeout(3000)
TASKS = Path(__file__).parent / "lm_eval_tasks"
CHOICE, GENERATION = "synthetic_multiple_choice", "synthetic_generation"
WORDS = "sky blue red green river stone light paper seven count water bridge".split()
QUESTIONS, CHOICES, CONTEXT_WORDS = 6, 3, 40
TOLERANCE = 1e-3  # of a log-likelihood, in float32


class Evaluation(NamedTuple):
    scores: dict[str, float]
    responses: list[Any]  # to each question, in order


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


def evaluate(target: Target, folder: Path, batch_size: int) -> dict[str, Evaluation]:
    """By task."""
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
        *("--tasks", f"{CHOICE},{GENERATION}", "--include_path", str(TASKS)),
        *("--batch_size", str(batch_size), "--output_path", "out", "--log_samples"),
    )
    (results,) = folder.glob("out/*/results_*.json")
    scores = json.loads(results.read_text())["results"]
    return {task: Evaluation(scores[task], responses(folder, task)) for task in scores}


def responses(folder: Path, task: str) -> list[Any]:
    (samples,) = folder.glob(f"out/*/samples_{task}_*.jsonl")
    logged = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(logged) == QUESTIONS
    return [one["resps"] for one in sorted(logged, key=lambda one: int(one["doc_id"]))]


@pytest.fixture(scope="module")
def single(system: System, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evaluation]:
    return evaluate(system.single_node, tmp_path_factory.mktemp("single"), 1)


@pytest.mark.parametrize("batch_size", [1, 4])  # prompts per request
def test_scores_are_those_of_one_engine(
    system: System, single: dict[str, Evaluation], tmp_path: Path, batch_size: int
) -> None:
    found = evaluate(system.gateway, tmp_path, batch_size)

    # Generated texts: the prompts are offloaded. Log-likelihoods need log-probabilities of the
    # prompt, which the decode node computes alone.
    outcomes = system.new_outcomes(QUESTIONS * (CHOICES + 1))
    assert outcomes == {
        ("remote", "completed"): QUESTIONS,
        ("local", "completed"): QUESTIONS * CHOICES,
    }
    assert found[GENERATION] == single[GENERATION]
    assert len({json.dumps(text) for text in found[GENERATION].responses}) > 1

    assert found[CHOICE].scores == single[CHOICE].scores
    assert {"acc,none", "acc_norm,none"} <= found[CHOICE].scores.keys()
    for ours, theirs in zip(found[CHOICE].responses, single[CHOICE].responses, strict=True):
        assert len(ours) == len(theirs) == CHOICES
        for ((likelihood, greedy),), ((expected, expected_greedy),) in zip(
            ours, theirs, strict=True
        ):
            assert float(likelihood) == pytest.approx(float(expected), abs=TOLERANCE)
            assert greedy == expected_greedy
