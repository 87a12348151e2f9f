"""Engines: what computes KV and continues from it. `api` is the contract. torch is imported by `hf`,
`checkpoint.make` and `hardware` alone; contract, emulation and profiling work without it."""
