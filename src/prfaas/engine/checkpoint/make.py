"""Makes a small checkpoint that transformers and vLLM load, and whose output depends on its state.

Independent of the engine. The same architecture, size and seed give the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging

from prfaas.engine.checkpoint import weights
from prfaas.engine.checkpoint.architectures import (
    ARCHITECTURES,
    DEFAULT_ARCH,
    DEFAULT_SEED,
    DEFAULT_SIZE,
    SIZES,
    Size,
)
from prfaas.engine.checkpoint.tokenizer import BOS, END, EOS, PAD, VOCAB_SIZE, save_tokenizer
from prfaas.engine.checkpoint.tokenizer import token_id as special
from prfaas.errors import InputError


@dataclass(frozen=True, slots=True)
class MadeCheckpoint:
    directory: Path
    arch: str
    size: Size
    seed: int
    model_type: str
    layers: int
    parameters: int
    max_tokens: int


def make_checkpoint(
    directory: Path,
    arch: str = DEFAULT_ARCH,
    size: Size = DEFAULT_SIZE,
    seed: int = DEFAULT_SEED,
    *,
    force: bool = False,
) -> MadeCheckpoint:
    """Writes config, weights (float32), generation config and tokenizer into `directory`. The
    directory must be new or empty; with `force` a checkpoint in it is replaced."""
    if arch not in ARCHITECTURES:
        raise InputError(f"unknown architecture {arch!r}", fix=f"known: {', '.join(ARCHITECTURES)}")
    if size not in SIZES:
        raise InputError(f"unknown size {size!r}", fix=f"known: {', '.join(SIZES)}")
    _make_room(directory, force=force)
    shape = ARCHITECTURES[arch]
    config = AutoConfig.for_model(
        shape.model_type,
        **shape.config_fields(size),
        bos_token_id=special(BOS),
        eos_token_id=special(EOS),
        pad_token_id=special(PAD),
        vocab_size=VOCAB_SIZE,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)  # for the vectors, which the model's code draws
        model = AutoModelForCausalLM.from_config(config)
    weights.draw(
        model,
        seed=seed,
        embedding_std=shape.embedding_std[size],
        experts_input_first=shape.experts_input_first,
    )
    model.generation_config = GenerationConfig(
        bos_token_id=special(BOS),
        eos_token_id=[special(EOS), special(END)],
        pad_token_id=special(PAD),
    )
    with _no_progress_bar():
        model.save_pretrained(directory)
    save_tokenizer(directory, max_tokens=config.max_position_embeddings)
    return MadeCheckpoint(
        directory=directory,
        arch=arch,
        size=size,
        seed=seed,
        model_type=shape.model_type,
        layers=config.num_hidden_layers,
        parameters=model.num_parameters(),
        max_tokens=config.max_position_embeddings,
    )


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """transformers shows a progress bar even when its output is not a terminal."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _make_room(directory: Path, *, force: bool) -> None:
    """Removes weights of another model, because loaders read every weights file. Other files of a
    checkpoint are overwritten; files that are not part of a checkpoint stay."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()) and not force:
            raise InputError(
                "the directory is not empty", file=directory, fix="name a new one, or use --force"
            )
        for path in directory.glob("*.safetensors*"):
            path.unlink()
    except OSError as error:
        raise InputError(
            f"cannot write to the directory: {error.strerror}",
            file=directory,
            fix="name another directory",
        ) from None
