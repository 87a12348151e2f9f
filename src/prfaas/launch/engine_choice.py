"""Engines as the command line names them: a Hugging Face checkpoint, or one that is emulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from prfaas.catalog import Catalog, ProfileRecord
from prfaas.engine.api import Engine, EngineLimits
from prfaas.engine.checkpoint.tokenizer import VOCAB_SIZE
from prfaas.engine.emulated import EmulatedEngine, EmulatedModel
from prfaas.engine.emulated.engine import CHUNK_TOKENS
from prfaas.engine.emulated.pace import Scales
from prfaas.errors import InputError
from prfaas.launch.extras import engine_extra
from prfaas.planner.problem import prefill_profile
from prfaas.planner.profile import DecodeStep

EMULATED_MAX_TOKENS = 131_072
EMULATED_VOCABULARY = VOCAB_SIZE  # what the small models' tokenizer writes can be asked of it


@dataclass(frozen=True, slots=True)
class EngineChoice:
    model: str  # a directory, or for an emulated engine a name of the catalog
    block_tokens: int
    max_waiting: int
    max_running: int | None = None  # None: what the kind of engine can carry
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EmulatedChoice:
    accelerator: str | None  # None: there must be one profile only
    gpus: int
    catalog: Sequence[Path]
    scales: Scales


def hf_engine(choice: EngineChoice, device: str | None, dtype: str | None) -> Engine:
    with engine_extra():
        from prfaas.engine.hf import HFEngine, load_model

    loaded = load_model(choice.model, device=device, dtype=dtype)
    running = {} if choice.max_running is None else {"max_running": choice.max_running}
    return HFEngine(
        loaded,
        block_tokens=choice.block_tokens,
        chunk_tokens=choice.chunk_tokens,
        max_waiting=choice.max_waiting,
        **running,
    )


def emulated_engine(choice: EngineChoice, emulation: EmulatedChoice) -> Engine:
    catalog = Catalog.builtin().extended(emulation.catalog)
    model = catalog.model(choice.model)
    record = _profile(catalog, choice.model, emulation)
    steps = [DecodeStep(point.batch, point.step_s) for point in record.decode]
    running = choice.max_running
    if running is None:
        running = max((step.batch for step in steps), default=0)  # 0: it only prefills
    limits = EngineLimits(EMULATED_MAX_TOKENS, EMULATED_VOCABULARY, running, choice.max_waiting)
    return EmulatedEngine(
        EmulatedModel(choice.model, model.spec(), prefill_profile(catalog, record), steps),
        limits=limits,
        block_tokens=choice.block_tokens,
        chunk_tokens=choice.chunk_tokens or CHUNK_TOKENS,
        scales=emulation.scales,
    )


def _profile(catalog: Catalog, model: str, emulation: EmulatedChoice) -> ProfileRecord:
    known = catalog.profiles_of(model)
    if emulation.accelerator is None and len(known) == 1:
        return known[0]
    for record in known:
        if (record.accelerator, record.gpus) == (emulation.accelerator, emulation.gpus):
            return record
    names = ", ".join(f"{record.gpus} x {record.accelerator}" for record in known)
    raise InputError(
        f"which profile of {model}? {emulation.gpus} x {emulation.accelerator} is none",
        where="--accelerator",
        fix=f"there are: {names or 'none'}; `prfaas profile` measures one",
    )
