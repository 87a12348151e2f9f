"""The command line of a vLLM server with prfaas's connector. Pure."""

from __future__ import annotations

import json

from prfaas.launch.services.hosts import EngineSpec
from prfaas.launch.services.places import HostPlace

_CERT_REQUIRED = "2"  # ssl.CERT_REQUIRED, as vLLM takes it
# By default vLLM passes what this library does not support to others, and the first grammar decides
# for all. One that no library finishes would then keep all later ones of the engine waiting.
_GRAMMARS = {"backend": "xgrammar"}


def vllm_options(engines: EngineSpec, place: HostPlace) -> list[str]:
    """The options that follow the model. The key of the API is not among them: every user of a
    host can read a command line."""
    words = ["--served-model-name", engines.name]
    words += ["--host", place.node_host, "--port", str(place.node_port)]
    if place.credentials is not None:
        tls = place.credentials.tls
        for option, file in (
            ("--ssl-ca-certs", tls.ca),
            ("--ssl-certfile", tls.cert),
            ("--ssl-keyfile", tls.key),
        ):
            assert file is not None, "TLS has all three files"
            words += [option, file]
        words += ["--ssl-cert-reqs", _CERT_REQUIRED]
    words += ["--enable-prefix-caching", "--structured-outputs-config", json.dumps(_GRAMMARS)]
    words += ["--kv-transfer-config", json.dumps(_connector(place))]
    words += ["--kv-events-config", json.dumps(_events(place))]
    return [*words, *place.engine_options]


def _connector(place: HostPlace) -> dict[str, object]:
    return {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvd": place.socket, "url": place.node_url},
    }


def _events(place: HostPlace) -> dict[str, object]:
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{place.events}",
    }
