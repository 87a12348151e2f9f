"""Round trips between PD clusters, as the deployment file states them."""

from __future__ import annotations

import itertools

from prfaas.config import Deployment
from prfaas.scheduler.view import LinkId
from prfaas.types import ClusterId


def round_trips(deployment: Deployment) -> dict[LinkId, float]:
    """Seconds between every two pd clusters that have a link, whichever direction it is stated
    for."""
    names = [cluster.name for cluster in deployment.of_kind("pd")]
    found: dict[LinkId, float] = {}
    for one, other in itertools.permutations(names, 2):
        link = deployment.link(one, other) or deployment.link(other, one)
        if link is not None:
            found[ClusterId(one), ClusterId(other)] = link.rtt_ms / 1e3
    return found
