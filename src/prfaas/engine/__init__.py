"""Engines compute KV and continue from it. `api` is the contract. Only `hf`, `checkpoint.make` and
`hardware` import torch; contract, emulation and profiling work without it."""
