"""vLLM as a prefill and decode node: `kv_connector_module_path` is this package.

--kv-transfer-config '{"kv_connector": "PrfaasConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "prfaas.integrations.vllm",
  "kv_connector_extra_config": {"kvd": "/run/prfaas/kvd.sock"}}'
"""

from typing import Any

__all__ = ["PrfaasConnector"]


def __getattr__(name: str) -> Any:
    """Imports the connector on its first use, so that what is pure here is usable without vLLM."""
    if name != "PrfaasConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from prfaas.integrations.vllm.connector import PrfaasConnector

    return PrfaasConnector
