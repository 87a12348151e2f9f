"""Tiny models for engine tests: made once a test run, with transformers' own `generate` beside."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.engine.hf import HFEngine, LoadedModel, load_model
from prfaas.studies.token_identical import GeneratedTokens

PAPER = ("kimi-linear", "qwen3-next", "mimo", "gpt-oss", "qwen3")
ALL = (*PAPER, "falcon-h1", "gemma3", "deepseek-v3")
grid = pytest.mark.grid  # the whole of it; a part runs with every change


def archs(names: Sequence[str], *always: str) -> list[Any]:
    """Parameters for every name, of which only some run always."""
    return [name if name in always else pytest.param(name, marks=grid) for name in names]


@functools.cache
def checkpoint(arch: str) -> Path:
    directory = Path(tempfile.mkdtemp(prefix="prfaas-test-")) / arch
    make_checkpoint(directory, arch)
    return directory


@functools.cache
def loaded(arch: str) -> LoadedModel:
    return load_model(checkpoint(arch))


@functools.cache
def engine(arch: str, chunk_tokens: int = 64) -> HFEngine:
    """Shared by tests: an engine that one job could harm would show it."""
    return HFEngine(loaded(arch), chunk_tokens=chunk_tokens)


def prompt(arch: str, length: int, seed: int = 0) -> list[int]:
    generator = np.random.default_rng((seed, length))
    return [int(token) for token in generator.integers(0, loaded(arch).vocab_size, length)]


@functools.cache
def _generated(arch: str, tokens: tuple[int, ...], count: int) -> GeneratedTokens:
    model = loaded(arch).model
    with torch.inference_mode():
        output = model.generate(
            torch.tensor([tokens]),
            # Without it a token that happens to be the padding one would be masked out.
            attention_mask=torch.ones((1, len(tokens)), dtype=torch.long),
            min_new_tokens=count,
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            return_dict_in_generate=True,
            output_logits=True,
        )
    logits = torch.stack(output.logits)[:, 0].numpy()
    return GeneratedTokens(tuple(output.sequences[0, len(tokens) :].tolist()), logits)


def reference(arch: str, tokens: Sequence[int], count: int) -> GeneratedTokens:
    """What transformers generates greedily in one process, uncut."""
    return _generated(arch, tuple(tokens), count)
