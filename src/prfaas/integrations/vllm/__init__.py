"""vLLM as a prefill and decode node: `kv_connector_module_path` is this package.

--kv-transfer-config '{"kv_connector": "PrfaasConnector", "kv_role": "kv_both",
  "kv_connector_module_path": "prfaas.integrations.vllm",
  "kv_connector_extra_config": {"kvd": "/run/prfaas/kvd.sock"}}'
"""

from prfaas.integrations.vllm.connector import PrfaasConnector

__all__ = ["PrfaasConnector"]
