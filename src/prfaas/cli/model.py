"""`prfaas model make`: makes a small checkpoint for tests, demos and benchmarks."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from prfaas.display.console import print_json
from prfaas.engine.checkpoint.architectures import (
    ARCHITECTURES,
    DEFAULT_ARCH,
    DEFAULT_SEED,
    DEFAULT_SIZE,
    SIZES,
    Size,
)
from prfaas.errors import InputError
from prfaas.launch.extras import engine_extra


@click.group()
def model() -> None:
    """Make models that need no download."""


@model.command()
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.option(
    "--arch",
    type=click.Choice(tuple(ARCHITECTURES)),
    default=DEFAULT_ARCH,
    show_default=True,
    help="Architecture of the model.",
)
@click.option(
    "--size",
    type=click.Choice(SIZES),
    default=DEFAULT_SIZE,
    show_default=True,
    help="Size of the model: tiny for tests, small for benchmarks.",
)
@click.option("--seed", default=DEFAULT_SEED, show_default=True, help="Seed of the random weights.")
@click.option("--force", is_flag=True, help="Replace a checkpoint that DIR already holds.")
@click.option("--json", "as_json", is_flag=True, help="Print a description as JSON.")
def make(directory: Path, arch: str, size: Size, seed: int, force: bool, as_json: bool) -> None:
    """Make a small checkpoint in DIR: random weights, a byte-level tokenizer, a chat template.

    The model's output makes no sense, but every token depends on the whole prompt. So a state that
    a transfer loses or damages shows in the tokens. The same seed gives the same files.

    \b
      prfaas model make ./tiny-kimi
      prfaas model make ./small-qwen --arch qwen3 --size small
    """
    if not 0 <= seed < 2**63:
        raise InputError(
            f"{seed} is out of range", where="--seed", fix="give a number from 0 to 2^63 - 1"
        )
    with engine_extra():
        from prfaas.engine.checkpoint.make import make_checkpoint
    made = make_checkpoint(directory, arch, size, seed, force=force)
    if as_json:
        print_json({**dataclasses.asdict(made), "directory": str(directory)})
        return
    click.echo(
        f"{made.directory}: {made.arch} ({made.model_type}), {made.layers} layers, "
        f"{made.parameters:,} parameters in float32, up to {made.max_tokens:,} tokens"
    )
