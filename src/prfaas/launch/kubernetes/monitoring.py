"""ServiceMonitors of Prometheus's operator. Pure."""

from __future__ import annotations

from prfaas.launch.kubernetes.pods import Manifest
from prfaas.launch.services.places import CA, CERT, KEY
from prfaas.security.tls import SERVICE_NAME

SECRET = "monitoring"
TOKEN = "metrics.token"  # the first line of metrics.key: a header has one key
FILES = (CA, CERT, KEY, TOKEN)
_PATH = "/metrics"


def service_monitor(name: str, selector: dict[str, str], ports: list[str]) -> Manifest:
    """Scrapes these ports over mutual TLS, with the metrics key."""
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "ServiceMonitor",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "prfaas"}},
        "spec": {
            "selector": {"matchLabels": selector},
            "endpoints": [_endpoint(port) for port in ports],
        },
    }


def _endpoint(port: str) -> Manifest:
    def secret(key: str) -> Manifest:
        return {"name": SECRET, "key": key}

    return {
        "port": port,
        "path": _PATH,
        "scheme": "https",
        "interval": "15s",
        "authorization": {"type": "Bearer", "credentials": secret(TOKEN)},
        "tlsConfig": {
            "ca": {"secret": secret(CA)},
            "cert": {"secret": secret(CERT)},
            "keySecret": secret(KEY),
            # Targets are addresses of pods, which no certificate has.
            "serverName": SERVICE_NAME,
        },
    }
