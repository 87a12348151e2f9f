"""HFEngine: runs any Hugging Face causal LM that caches in transformers' standard layers."""

from prfaas.engine.hf.engine import HFEngine
from prfaas.engine.hf.load import LoadedModel, load_model

__all__ = ["HFEngine", "LoadedModel", "load_model"]
