from __future__ import annotations

import warnings

# vLLM and torch warn about themselves while they are imported; everything after that is ours.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import prfaas.integrations.vllm  # noqa: F401
