"""The home of each request: the PD cluster at which it arrives."""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.cache.hashing import PromptHashes
from prfaas.errors import RequestError
from prfaas.gateway.homes.home_turns import HomeTurns
from prfaas.gateway.request import GatewayRequest
from prfaas.gateway.router import Router
from prfaas.types import ClusterId


class RequestHomes:
    def __init__(
        self, router: Router, shares: Mapping[ClusterId, float], own: ClusterId | None
    ) -> None:
        """`shares`: of the traffic, by PD cluster. `own`: the PD cluster whose requests this
        gateway receives; None: those of all PD clusters."""
        homes = list(shares)
        self._router = router
        self._only = own or (homes[0] if len(homes) == 1 else None)
        self._homes = homes if self._only is None else [self._only]
        self._turns = HomeTurns(shares)

    def of(self, request: GatewayRequest, prompt: PromptHashes, *, take: bool = True) -> ClusterId:
        """`take`: the request is served, and not only asked about. Raises `RequestError` when the
        request names a PD cluster whose requests this gateway does not receive."""
        named = ClusterId(request.cluster)
        if named and named not in self._homes:
            raise RequestError(
                400,
                "unknown_cluster",
                f"this gateway receives requests of {', '.join(self._homes)}; leave the header "
                "X-Prfaas-Cluster out, or name one of these",
                param="X-Prfaas-Cluster",
            )
        if named or self._only is not None:
            return named or self._homes[0]
        return self._router.choose_home(prompt, self._turns, take=take)
