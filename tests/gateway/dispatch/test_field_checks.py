"""Fields that the decode engine refuses: the refusal comes before the grant, not after a prefill
and a transfer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prfaas.errors import RequestError
from prfaas.gateway.request import GatewayRequest, RequestTrace
from tests.gateway.backends import THRESHOLD, answered, gateway_request, prompt, serving
from tests.gateway.conftest import Hosts

LONG = 2 * THRESHOLD


def asking(seed: int, **more: Any) -> GatewayRequest:
    request = gateway_request(prompt(LONG, seed))
    return replace(request, fields={**request.fields, **more})


@pytest.mark.xfail(strict=True, reason="the engine is asked after the prefill and the transfer")
@pytest.mark.parametrize(
    ("seed", "field", "value"),
    [(901, "logit_bias", {"7": 5}), (902, "stop_token_ids", "7"), (903, "ignore_eos", [])],
)
async def test_a_field_that_the_engine_refuses_costs_no_prefill(
    emulated: Hosts, seed: int, field: str, value: object
) -> None:
    async with serving(emulated.deployment()) as backend:
        trace = RequestTrace(0.0)
        with pytest.raises(RequestError, match=field) as refused:
            async with backend.answer(asking(seed, **{field: value}), trace):
                pass
        assert refused.value.status == 400 and trace.attempts == 1
        assert trace.granted_s is None and trace.prefill == "far0"
        found = await answered(backend, asking(seed))
        assert found.trace.cached_tokens == 0, "nothing was prefilled for the refused request"
