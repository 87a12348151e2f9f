"""Builds the engine of `prfaas node`: a Hugging Face checkpoint, or an emulated one."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from prfaas.catalog import Catalog, ProfileRecord
from prfaas.engine.api import Engine, EngineLimits
from prfaas.engine.checkpoint.tokenizer import VOCAB_SIZE
from prfaas.engine.emulated import EmulatedEngine, EmulatedModel
from prfaas.engine.emulated.engine import CHUNK_TOKENS
from prfaas.engine.emulated.pace import Scales
from prfaas.engine.kernel_cache import use_kernel_cache
from prfaas.engine.quick_imports import hidden, kept_bytecode
from prfaas.engine.start_phases import start_phase, without_collection
from prfaas.engine.warm_up import check_lengths, default_lengths
from prfaas.errors import InputError
from prfaas.launch.extras import engine_extra
from prfaas.planner.instance_times import prefill_profile
from prfaas.planner.profile import DecodeStep

_LOG = logging.getLogger(__name__)
EMULATED_MAX_TOKENS = 131_072
EMULATED_VOCABULARY = VOCAB_SIZE  # the vocabulary of the small models' tokenizer


@dataclass(frozen=True, slots=True)
class EngineChoice:
    model: str  # a folder, or for the emulated engine a name of the catalog
    block_tokens: int
    max_waiting: int
    max_running: int | None = None  # None: the engine's choice
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EmulatedChoice:
    accelerator: str | None  # None: the model must have exactly one profile
    gpus: int
    catalog: Sequence[Path]
    scales: Scales


@dataclass(frozen=True, slots=True)
class ChosenEngine:
    engine: Engine
    default_warm_up: tuple[int, ...] = ()  # lengths that its device needs; none on a CPU


# With it, torch's allocator grows the memory that it has. States of many sizes would otherwise cut
# it into parts that fit no later one. The figures of docs/gpu.md were taken with it; what it gains
# was not measured alone. The second name is the older one; a setting of the operator stays.
_ALLOCATOR, _OLD_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
_GROWING = "expandable_segments:True"


def import_hf_engine(device: str | None, kernel_cache: str | None) -> None:
    """Imports what `hf_engine` needs, which takes seconds."""
    if device != "cpu" and _OLD_ALLOCATOR not in os.environ:
        os.environ.setdefault(_ALLOCATOR, _GROWING)
    with ExitStack() as stack:
        # A CPU has no kernels to keep.
        if device != "cpu" and find_spec("triton") is not None:
            folder = use_kernel_cache(kernel_cache)
            _LOG.info("start: compiled kernels are kept in %s", folder)
            stack.enter_context(kept_bytecode(folder / "bytecode"))
        stack.enter_context(engine_extra())
        stack.enter_context(start_phase("imported torch and transformers"))
        stack.enter_context(without_collection())
        # transformers imports it wherever it is installed, for a kind of generation that is not
        # used here, and with it pandas and scipy: a seventh of the imports' time.
        stack.enter_context(hidden("sklearn"))
        import prfaas.engine.hf  # noqa: F401


def hf_engine(
    choice: EngineChoice,
    device: str | None,
    dtype: str | None,
    warm_up: Sequence[int] = (),
) -> ChosenEngine:
    """InputError for lengths of `warm_up` that the model cannot have, before an engine starts."""
    with engine_extra():
        from prfaas.engine.hf import HFEngine, load_model
        from prfaas.engine.hf.engine import CHUNK_TOKENS as HF_CHUNK_TOKENS

    loaded = load_model(choice.model, device=device, dtype=dtype)
    check_lengths(warm_up, loaded.max_tokens)
    engine = HFEngine(
        loaded,
        block_tokens=choice.block_tokens,
        chunk_tokens=choice.chunk_tokens,
        max_running=choice.max_running,
        max_waiting=choice.max_waiting,
    )
    if loaded.device.type == "cpu":
        return ChosenEngine(engine)
    chunk_tokens = choice.chunk_tokens or HF_CHUNK_TOKENS[loaded.device.type]
    return ChosenEngine(engine, default_lengths(chunk_tokens, loaded.max_tokens))


def emulated_engine(choice: EngineChoice, emulation: EmulatedChoice) -> ChosenEngine:
    catalog = Catalog.builtin().extended(emulation.catalog)
    model = catalog.model(choice.model)
    record = _profile(catalog, choice.model, emulation)
    steps = [DecodeStep(point.batch, point.step_s) for point in record.decode]
    running = choice.max_running
    if running is None:
        running = max((step.batch for step in steps), default=0)  # 0: it only prefills
    limits = EngineLimits(EMULATED_MAX_TOKENS, EMULATED_VOCABULARY, running, choice.max_waiting)
    engine = EmulatedEngine(
        EmulatedModel(choice.model, model.spec(), prefill_profile(catalog, record), steps),
        limits=limits,
        block_tokens=choice.block_tokens,
        chunk_tokens=choice.chunk_tokens or CHUNK_TOKENS,
        scales=emulation.scales,
    )
    return ChosenEngine(engine)


def _profile(catalog: Catalog, model: str, emulation: EmulatedChoice) -> ProfileRecord:
    known = catalog.profiles_of(model)
    if emulation.accelerator is None and len(known) == 1:
        return known[0]
    for record in known:
        if (record.accelerator, record.gpus) == (emulation.accelerator, emulation.gpus):
            return record
    names = ", ".join(f"{record.gpus} x {record.accelerator}" for record in known)
    raise InputError(
        f"{model} has no profile for {emulation.gpus} x {emulation.accelerator}",
        where="--accelerator",
        fix=f"profiles are: {names or 'none'}; `prfaas profile` measures one",
    )
