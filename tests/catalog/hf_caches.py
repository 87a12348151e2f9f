"""What transformers caches for a config, counted tensor by tensor in the canonical wire form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, DynamicCache

Bytes = dict[tuple[str, int], int]  # by kind of group and layer number


def load(config: dict[str, Any], folder: Path) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return AutoConfig.from_pretrained(folder)


def saved(config: Any, folder: Path) -> dict[str, Any]:
    """The file transformers itself writes for the same model: other fields, other spelling."""
    config.save_pretrained(folder)
    parsed: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return parsed


def default_elements(config: Any) -> int:
    """Elements of the matrices of a model of full size, whose weights are not allocated."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(
        weights.numel()
        for name, weights in model.named_parameters()
        if weights.dim() >= 2 and "bias" not in name
    )


class Prefill:
    """A random model of the architecture. Only shapes are looked at, so weights do not matter."""

    def __init__(self, config: Any, dtype: torch.dtype) -> None:
        self.config = config.get_text_config()
        # Not every text model can be had without the multimodal one around it.
        buildable = self.config if type(self.config) in MODEL_MAPPING else config
        self.model = AutoModel.from_config(buildable, dtype=dtype).eval()

    def matrix_elements(self) -> int:
        """Elements of the language model's matrices, without convolutions, biases and norms."""
        apart = ("conv", "bias", "A_log", "visual", "vision", "multi_modal")
        return sum(
            weights.numel()
            for name, weights in self.model.named_parameters()
            if weights.dim() >= 2 and not any(word in name for word in apart)
        )

    def wire_bytes(self, tokens: int) -> Bytes:
        cache = DynamicCache(config=self.config)
        prompt = torch.full((1, tokens), 7)
        with torch.inference_mode():
            self.model(prompt, past_key_values=cache, use_cache=True)
        counted: Bytes = {}
        for number, layer in enumerate(cache.layers):
            counted |= _layer_bytes(layer, number)
        return counted


def _layer_bytes(layer: Any, number: int) -> Bytes:
    counted: Bytes = {}
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    if keys is not None and values is not None:
        kind = "FullAttention"
        if layer.is_sliding:
            # The next token brings its own key and value, so it needs one less than the window.
            kind, needed = "SlidingWindow", layer.sliding_window - 1
            keys, values = keys[:, :, -needed:], values[:, :, -needed:]
        counted[kind, number] = keys.nbytes + values.nbytes + _indexer_bytes(layer)
    conv = getattr(layer, "conv_states", {}).get(0)
    if conv is not None:
        # The oldest of the kernel's columns leaves it when the next token comes.
        state = layer.recurrent_states[0]
        counted["LinearState", number] = conv[..., 1:].nbytes + state.nbytes
    return counted


def _indexer_bytes(layer: Any) -> int:
    """transformers keeps the indexer's keys in the model's dtype. Production engines, and so the
    wire, keep one FP8 byte per element and a float32 scale per 128 elements."""
    keys = getattr(layer, "indexer_keys", None)
    if keys is None:
        return 0
    scales = sum(4 for _ in keys.split(128, dim=-1))
    return int(keys.to(torch.float8_e4m3fn).nbytes) + keys.shape[1] * scales
