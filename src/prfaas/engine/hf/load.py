"""Loads a model from a checkpoint directory, or from a config only, or raises one clear error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from prfaas.catalog.hf_file import read_hf_config
from prfaas.engine.fingerprint import fingerprint
from prfaas.engine.hf.attention import without_stored_masks
from prfaas.engine.hf.shapes import LayerShape, layer_shapes
from prfaas.errors import InputError
from prfaas.kvspec import KVSpec, build_spec
from prfaas.types import Compat

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
    config = _config(path)
    geometry = read_hf_config(path)
    spec = build_spec(geometry.geometries, kv_dtype=dtype_name, state_dtype=geometry.state_dtype)
    model = _model(path, config, torch_device, DTYPES[dtype_name], random_weights)
    if torch_device.type == "cuda":
        without_stored_masks(model)
    shapes = layer_shapes(model, spec, DTYPES[geometry.state_dtype], where=str(path))
    text_config = model.config.get_text_config()
    return LoadedModel(
        model=model,
        spec=spec,
        shapes=shapes,
        device=torch_device,
        dtype=DTYPES[dtype_name],
        state_dtype=geometry.state_dtype,
        revision="random" if random_weights else fingerprint(path),
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
        model = AutoModelForCausalLM.from_pretrained(path, local_files_only=True, dtype=dtype)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise InputError(
            f"transformers cannot load the checkpoint: {_first_line(error)}",
            file=path,
            fix="check that every weights file is present and complete",
        ) from error
    return model.eval().to(device)


def _eos(generation: GenerationConfig) -> frozenset[int]:
    eos = generation.eos_token_id
    return frozenset(() if eos is None else [eos] if isinstance(eos, int) else eos)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
