"""Reports of a gateway, as another one receives them."""

from __future__ import annotations

from typing import Any

import msgspec

from prfaas.contracts.gateway_api import GatewayReport

EMPTY = GatewayReport(
    cluster="west",
    instance="first",
    epoch=0,
    plans=False,
    loads={},
    uses={},
    draining=(),
    first_row=1,
    rows=(),
)


def report(**fields: Any) -> GatewayReport:
    """Over the wire and back, so that values which a message cannot have are found."""
    return sent(msgspec.structs.replace(EMPTY, **fields))


def sent(made: GatewayReport) -> GatewayReport:
    return msgspec.json.decode(msgspec.json.encode(made), type=GatewayReport)
