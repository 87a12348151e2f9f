"""Loads a model from a checkpoint directory, or from a config only, or raises one clear error."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.integrations import accelerate as device_maps
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from prfaas.catalog.hf_file import read_hf_config
from prfaas.engine.fingerprint import fingerprint
from prfaas.engine.hf import tuning
from prfaas.engine.hf.attention import without_stored_masks
from prfaas.engine.hf.shapes import LayerShape, layer_shapes
from prfaas.engine.start_phases import start_phase, without_collection
from prfaas.errors import InputError
from prfaas.kvspec import KVSpec, build_spec
from prfaas.types import Compat

_LOG = logging.getLogger(__name__)
# Kernels are tuned by their first run, so that run must look like one that matters: long enough to
# fill a device, short enough for its memory.
TUNED_TOKENS = 2048
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: Any  # a transformers causal LM in eval mode
    spec: KVSpec
    shapes: Mapping[int, LayerShape]  # of the layers that cache
    device: torch.device
    dtype: torch.dtype
    state_dtype: str
    revision: str
    max_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]

    def compat(self, block_tokens: int) -> Compat:
        return Compat(
            model=self.model.config.architectures[0],
            revision=self.revision,
            kv_dtype=_dtype_name(self.dtype),
            state_dtype=self.state_dtype,
            block_tokens=block_tokens,
            layout="canonical",
        )


def load_model(
    source: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    random_weights: bool = False,
) -> LoadedModel:
    """`source` is a checkpoint directory. With `random_weights` it may also be a `config.json`, so
    that a full-size architecture can be timed without its checkpoint.

    The default is CUDA in bfloat16 where a device exists, else the CPU in float32, because not
    every CPU computes in bfloat16.
    """
    path = _checked(Path(source), random_weights)
    torch_device = _device(device)
    dtype_name = dtype or ("bfloat16" if torch_device.type == "cuda" else "float32")
    if dtype_name not in DTYPES:
        raise InputError(
            f"unknown dtype {dtype_name!r}", where="dtype", fix=f"use one of: {', '.join(DTYPES)}"
        )
    with start_phase("read the config"):
        config = _config(path)
        geometry = read_hf_config(path)
    spec = build_spec(geometry.geometries, kv_dtype=dtype_name, state_dtype=geometry.state_dtype)
    # The libraries of kernels are part of it.
    with start_phase("imported the model's code"), without_collection():
        _import_code(path, config)
    with start_phase(f"loaded the weights onto {torch_device}"):
        model = _model(path, config, torch_device, DTYPES[dtype_name], random_weights)
    text_config = model.config.get_text_config()
    first_tokens = 0
    if torch_device.type == "cuda":
        without_stored_masks(model)
        first_tokens = min(TUNED_TOKENS, text_config.max_position_embeddings)
        if not tuning.speed_up():
            _LOG.info("start: no Triton, or an old one: kernels are tuned one after the other")
    with start_phase("ran the model once"), tuning.compiling_in_processes():
        shapes = layer_shapes(
            model,
            spec,
            DTYPES[geometry.state_dtype],
            first_tokens=first_tokens,
            where=str(path),
        )
    with start_phase("read the weights' fingerprint"):
        revision = "random" if random_weights else fingerprint(path)
    return LoadedModel(
        model=model,
        spec=spec,
        shapes=shapes,
        device=torch_device,
        dtype=DTYPES[dtype_name],
        state_dtype=geometry.state_dtype,
        revision=revision,
        max_tokens=text_config.max_position_embeddings,
        vocab_size=text_config.vocab_size,
        eos_token_ids=_eos(model.generation_config),
    )


def _checked(source: Path, random_weights: bool) -> Path:
    if source.is_file() and random_weights:
        return source
    if not source.is_dir():
        raise InputError(
            "no such directory", file=source, fix="name a Hugging Face checkpoint directory"
        )
    if not (source / "config.json").is_file():
        raise InputError(
            "the directory has no config.json",
            file=source,
            fix="name a Hugging Face checkpoint directory",
        )
    return source


def _device(name: str | None) -> torch.device:
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(
            f"unknown device {name!r}", where="device", fix="use cpu, cuda or cuda:N"
        ) from None
    if device.type not in ("cpu", "cuda"):
        raise InputError(
            f"unsupported device {name!r}", where="device", fix="use cpu, cuda or cuda:N"
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"{name!r} does not exist: this host has {torch.cuda.device_count()} CUDA devices",
            where="device",
            fix="use --device cpu",
        )
    return device


def _config(path: Path) -> Any:
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"transformers cannot read the config: {_first_line(error)}", file=path
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(
            f"{config.model_type!r} is not a causal language model",
            file=path,
            fix="name a checkpoint that generates text",
        )
    return config


def _import_code(path: Path, config: Any) -> None:
    try:
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    except (ImportError, RuntimeError, OSError) as error:
        raise InputError(
            f"transformers cannot import the model's code: {_first_line(error)}",
            file=path,
            fix="install what the message names",
        ) from error


def _model(
    path: Path, config: Any, device: torch.device, dtype: torch.dtype, random_weights: bool
) -> Any:
    if random_weights:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if not model.config.architectures:
            model.config.architectures = [type(model).__name__]
        return model.eval()
    try:
        model = _from_pretrained(path, device, dtype)
    except torch.OutOfMemoryError:
        raise InputError(
            f"{device} has too little memory for the weights in {_dtype_name(dtype)}",
            file=path,
            where="device",
            fix="use a device with more free memory, or --device cpu",
        ) from None
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"transformers cannot load the checkpoint: {_first_line(error)}",
            file=path,
            fix="check that every weights file is present and complete",
        ) from error
    return model.eval()


def _from_pretrained(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    """On a GPU, every tensor goes from the file to the device, and experts are merged there. That
    is several times as fast as a whole model in the host's memory that is moved afterwards."""
    if device.type == "cpu":
        return AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype)
    try:
        return _onto_device(path, device, dtype)
    except (ImportError, AttributeError, NameError, TypeError) as error:
        # Of a version of transformers that needs more of accelerate than this host has.
        _LOG.warning("start: the weights go through the host's memory: %r", error)
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype)
        return model.to(device)


def _onto_device(path: Path, device: torch.device, dtype: torch.dtype) -> Any:
    with _device_map_of_one():
        return AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, dtype=dtype, device_map={"": device}
        )


@contextmanager
def _device_map_of_one() -> Iterator[None]:
    """transformers requires the accelerate package for every device map. It uses the package to
    spread a model over several devices, and fills a map with one device by itself."""
    required = device_maps.is_accelerate_available
    device_maps.is_accelerate_available = lambda *args, **more: True
    try:
        yield
    finally:
        device_maps.is_accelerate_available = required


def _eos(generation: GenerationConfig) -> frozenset[int]:
    eos = generation.eos_token_id
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
