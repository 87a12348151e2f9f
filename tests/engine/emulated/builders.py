"""A model with every kind of state, and a profile of it."""

from __future__ import annotations

from typing import Any

from prfaas.engine.api import EngineLimits
from prfaas.engine.emulated import EmulatedEngine, EmulatedModel
from prfaas.kvspec import GQA, MLA, KVSpec, Linear, WindowedGQA, build_spec
from prfaas.planner.profile import DecodeStep, PrefillProfile, PrefillTime

LAYERS = 8
SPEC: KVSpec = build_spec(
    [
        GQA((3,), kv_heads=2, k_dim=8, v_dim=4),
        MLA((7,), kv_lora_rank=9, rope_dim=4),
        WindowedGQA((1, 5), kv_heads=1, k_dim=4, v_dim=4, window=16),
        Linear((0, 2, 4, 6), k_heads=2, v_heads=3, k_dim=4, v_dim=5, conv_kernel=4),
    ]
)
PROFILE = PrefillProfile(
    [PrefillTime(64, 0, 1.0), PrefillTime(256, 0, 3.0), PrefillTime(1024, 0, 20.0)],
    provenance="measured: made up",
)
STEPS = (DecodeStep(1, 0.2), DecodeStep(8, 0.5))
MODEL = EmulatedModel("made-up", SPEC, PROFILE, STEPS)


def emulated(
    *,
    max_running: int = 8,
    max_waiting: int = 16,
    max_tokens: int = 4096,
    vocab_size: int = 256,
    **options: Any,
) -> EmulatedEngine:
    limits = EngineLimits(max_tokens, vocab_size, max_running, max_waiting)
    return EmulatedEngine(MODEL, limits=limits, block_tokens=64, **options)
