"""The OpenAPI documents of gateway, node and kvd, with keys and without."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from prfaas import __version__
from prfaas.gateway.api.openapi import openapi as gateway_document
from prfaas.kvd.openapi import openapi as kvd_document
from prfaas.node.openapi import openapi as node_document
from tests.goldens.canonical import Golden

DOCUMENTS = {"gateway": gateway_document, "node": node_document, "kvd": kvd_document}


def goldens() -> Iterator[Golden]:
    for name, made in DOCUMENTS.items():
        with_keys, without = (_parsed(made(with_keys=keys)) for keys in (True, False))
        yield Golden(f"{name}.json", with_keys)
        responses = {
            f"{method} {path}": sorted(operation["responses"])
            for path, methods in without["paths"].items()
            for method, operation in methods.items()
        }
        parts = {"components": sorted(without["components"]), "responses": responses}
        yield Golden(f"{name}.without_keys.json", parts)


def _parsed(document: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(document)
    assert found["info"]["version"] == __version__
    found["info"]["version"] = "VERSION"
    return found
