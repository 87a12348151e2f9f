"""Engines: what computes KV and continues from it. `api` is the contract; torch is imported by the
Hugging Face engine's own files alone."""
