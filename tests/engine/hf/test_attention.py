"""The triangle that is named instead of stored: the same logits, chunk by chunk (here on the CPU,
where torch stores it after all; on CUDA flash kernels take its name)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.attention.bias import CausalBias

from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.engine.hf import attention
from prfaas.engine.hf.load import load_model

PROMPT = [(7 * n * n + n) % 250 for n in range(90)]
CHUNKS = (32, 65, 90)


def logits(model: object) -> torch.Tensor:
    past, start, found = None, 0, []
    with torch.inference_mode():
        for stop in CHUNKS:
            ids = torch.tensor([PROMPT[start:stop]])
            output = model(ids, past_key_values=past, use_cache=True)  # type: ignore[operator]
            past, start = output.past_key_values, stop
            found.append(output.logits[0])
    return torch.cat(found)


@pytest.mark.parametrize("arch", ["kimi-linear", "qwen3", "qwen3-next", "gemma3"])
def test_logits_do_not_change(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path / arch, arch, "tiny", seed=0)
    model = load_model(tmp_path / arch, device="cpu").model
    assert model.config._attn_implementation == "sdpa"
    expected = logits(model)
    named: list[bool] = []
    real = attention.attend

    def seen(module, query, key, value, attention_mask, **more):  # type: ignore[no-untyped-def]
        named.append(isinstance(attention_mask, CausalBias))
        return real(module, query, key, value, attention_mask, **more)

    monkeypatch.setattr(attention, "attend", seen)
    attention.without_stored_masks(model)
    torch.testing.assert_close(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert any(named)


def test_other_attention_is_left_alone(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "m", "gpt-oss", "tiny", seed=0)
    model = load_model(tmp_path / "m", device="cpu").model
    before = model.config._attn_implementation
    attention.without_stored_masks(model)
    assert model.config._attn_implementation == before != attention.NAME
