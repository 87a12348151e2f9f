"""The models of `bench/gpu.py`: their configs, and a checkpoint with drawn weights.

The hybrid has Kimi-Linear's shape with 8 experts instead of 256, of which a token uses 8 as in the
full model: 6.9 GB in bfloat16, and the arithmetic of one token is the full model's. The dense model
is Qwen3-4B's shape.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

from _gpu_options import GpuOptions
from prfaas.engine.checkpoint.architectures import ARCHITECTURES

MODELS = Path(__file__).parent / "models"
HYBRID, DENSE = "kimi-linear, 8 experts", "qwen3-4b"
EXPERTS = 8
SMALL_VOCABULARY = 512  # more than the byte-level tokenizer's, as in the full size
SEED = 19
SHARD_SIZE = "2GB"


def config_fields(name: str, *, small: bool) -> dict[str, Any]:
    """Fields of transformers' config class, with `model_type`."""
    if small:
        arch = ARCHITECTURES["kimi-linear" if name == HYBRID else "qwen3"]
        fields = {"model_type": arch.model_type, **arch.config_fields("tiny")}
        special = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0)
        return {**fields, **special, "vocab_size": SMALL_VOCABULARY}
    file = MODELS / ("kimi-linear-48b-a3b.json" if name == HYBRID else "qwen3-4b.json")
    fields = json.loads(file.read_text(encoding="utf-8"))
    return {**fields, "num_local_experts": EXPERTS} if name == HYBRID else fields


def write_config(name: str, options: GpuOptions) -> Path:
    """A config file in a folder of its own, from which an engine with random weights is made."""
    folder = options.folder / name.split(",")[0]
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    path.write_text(json.dumps(config_fields(name, small=options.small)), encoding="utf-8")
    return path


def make_checkpoint(directory: Path, options: GpuOptions) -> dict[str, Any]:
    """Writes a checkpoint of the hybrid model whose answers depend on its whole state, as those of
    `prfaas model make` do. Weights are drawn on the device, because 3.5 billion numbers take a CPU
    a minute. Returns what it has done, with seconds."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    from prfaas.engine.checkpoint.tokenizer import save_tokenizer

    logging.disable_progress_bar()
    began_s = time.perf_counter()
    fields = config_fields(HYBRID, small=options.small)
    config = AutoConfig.for_model(**{**fields, "dtype": options.dtype})
    torch.manual_seed(SEED)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, options.dtype))
    _draw(model)
    if options.device != "cpu":
        torch.cuda.synchronize()
    drawn_s = time.perf_counter()
    model.save_pretrained(directory, max_shard_size=SHARD_SIZE)
    limit = getattr(config, "max_position_embeddings", None) or config.model_max_length
    save_tokenizer(directory, max_tokens=limit)
    saved_s = time.perf_counter()
    nbytes = flush(directory)
    found = {
        "gigabytes": round(nbytes / 1e9, 3),
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "draw_s": round(drawn_s - began_s, 2),
        "save_s": round(saved_s - drawn_s, 2),
        "flush_s": round(time.perf_counter() - saved_s, 2),
    }
    del model
    if options.device != "cpu":
        torch.cuda.empty_cache()
    return found


def _draw(model: Any) -> None:
    """`engine.checkpoint.weights.draw` with the default generator of the weights' device."""
    import torch

    from prfaas.engine.checkpoint.weights import DECAY_BIAS, DECAY_RATES, GAIN

    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    slow, fast = (math.log(rate) for rate in DECAY_RATES)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            if id(weight) in embeddings:
                weight.normal_(0.0, 1.0)
            elif name.endswith(".A_log"):
                weight.copy_(torch.linspace(slow, fast, weight.numel()).view(weight.shape))
            elif name.endswith(".dt_bias"):
                weight.fill_(DECAY_BIAS)
            elif weight.ndim >= 2 and not name.endswith("bias"):
                weight.normal_(0.0, GAIN / weight.shape[-1] ** 0.5)


def flush(directory: Path) -> int:
    """Writes the files' bytes to the disk, so that a later read can come from there. Returns how
    many they are."""
    nbytes = 0
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
        nbytes += path.stat().st_size
    return nbytes


def drop_from_page_cache(directory: Path) -> float | None:
    """Asks the kernel to forget the files' pages (`POSIX_FADV_DONTNEED`, which needs no root).
    Returns the share of the bytes that is in memory all the same; None where this is not known."""
    resident = total = 0
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = _resident_pages(path)
        if found is None:
            return None
        resident += found[0]
        total += found[1]
    return round(resident / max(1, total), 4)


def _resident_pages(path: Path) -> tuple[int, int] | None:
    import ctypes
    import mmap

    import numpy as np

    size = path.stat().st_size
    if not size:
        return 0, 0
    pages = -(-size // mmap.PAGESIZE)
    found = np.zeros(pages, dtype=np.uint8)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as mapped:
        array = np.frombuffer(mapped, dtype=np.uint8)
        mincore = ctypes.CDLL(None, use_errno=True).mincore
        failed = mincore(
            ctypes.c_void_p(array.ctypes.data),
            ctypes.c_size_t(size),
            ctypes.c_void_p(found.ctypes.data),
        )
        del array  # before the mapping is closed
    return None if failed else (int((found & 1).sum()), pages)
