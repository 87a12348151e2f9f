"""Engines: what computes KV and continues from it. `api` is the contract. `hf`, `checkpoint.make`
and `hardware` alone import torch; contract, emulation and profiling work without it."""
