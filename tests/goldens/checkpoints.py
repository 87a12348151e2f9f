"""A checkpoint's folder without weights: a configuration and a tokenizer."""

from __future__ import annotations

from pathlib import Path

from prfaas.engine.checkpoint.tokenizer import save_tokenizer

_CONFIG = """{
  "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 4096,
  "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
  "intermediate_size": 12288, "vocab_size": 151936, "torch_dtype": "bfloat16",
  "max_position_embeddings": 40960, "tie_word_embeddings": false, "hidden_act": "silu"
}
"""


def make_checkpoint(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(_CONFIG, encoding="utf-8")
    save_tokenizer(folder, max_tokens=40_960)
