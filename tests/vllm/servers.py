"""vLLM servers with our connector and cache events, each attached to a kvd of the test's."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from prfaas_lab.testing.vllm_server import VllmServer, start_vllm


def connected_server(
    directory: Path,
    name: str,
    model: Path,
    kvd: Path,
    *,
    core: int,
    flags: Sequence[str],
    settings: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> VllmServer:
    """`settings`: of the connector, beside its kvd."""
    transfer = {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvd": str(kvd), **(settings or {})},
    }
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{directory / name}.events",
    }
    return start_vllm(
        Path(sys.executable),
        model,
        directory / f"{name}.log",
        core=core,
        transfer=transfer,
        flags=["--max-model-len", "4096", "--kv-events-config", json.dumps(events), *flags],
        env=env,
    )
