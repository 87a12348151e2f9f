"""Problems from files: a model that its config.json describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prfaas.config import load_deployment
from prfaas.errors import InputError
from prfaas.planner.problem import Problem
from prfaas.studies.problem_files import Study
from tests.catalog.hf_models import PUBLISHED

EXAMPLE = Path(__file__).parents[2] / "configs" / "qwen3.5_h200_h20.toml"
NAME = 'name = "qwen3.5-397b-a17b"'
WIDTH = "max_tokens = 131072"  # fewer atoms make a faster plan


def problem(folder: Path, text: str) -> Problem:
    file = folder / "deployment.toml"
    file.write_text(text.replace(WIDTH, "max_tokens = 8192"))
    return Study(file, "paper").problem(load_deployment(file))


def test_a_models_own_config_is_estimated_like_its_catalog_entry(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    assert NAME in text and WIDTH in text
    known = problem(tmp_path, text)
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["qwen3.5-397b-a17b"].config))
    own = problem(tmp_path, text.replace(NAME, 'name = "mine"\nconfig = "config.json"'))
    assert own.local.decode == known.local.decode
    for ours, theirs in zip(own.pools, known.pools, strict=True):
        assert ours.profile.points == theirs.profile.points
        assert ours.error is not None and theirs.error is not None


def test_a_config_without_matrices_is_refused_where_times_are_estimated(tmp_path: Path) -> None:
    text = EXAMPLE.read_text(encoding="utf-8")
    config = dict(PUBLISHED["qwen3-4b"].config)
    del config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"vocab_size: is missing \(model_type 'qwen3'\)"):
        problem(tmp_path, text.replace(NAME, 'name = "mine"\nconfig = "config.json"'))
