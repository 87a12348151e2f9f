"""Conclusions of the short-term loop for operators: one log line and one metric per change.

The conclusions are verdicts on links, estimates of their rates, and the factor on the plan's
threshold, each with its cause. Without them an operator cannot find out later why requests were
routed as they were.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from prfaas.gateway.exposition.families import counter
from prfaas.scheduler.congestion import LinkVerdict
from prfaas.scheduler.state import LinkState, ShortTermState
from prfaas.scheduler.view import LinkId
from prfaas.service.logging import with_fields
from prfaas.types import ClusterId

log = logging.getLogger(__name__)

# A link's estimated rate moves a little with every report. It is logged when it has moved this much
# since the last line.
_NOTABLE_RATIO = 1.5


class ShortTermLog:
    def __init__(self) -> None:
        self._states: Mapping[ClusterId, ShortTermState] = {}
        self._logged_bps: dict[LinkId, float | None] = {}
        self._changes: Counter[tuple[LinkId, str, str]] = Counter()  # link, verdict, cause
        self._factor_changes = 0

    def record(self, states: Mapping[ClusterId, ShortTermState]) -> None:
        """Logs and counts what has changed in the states of the PD clusters since the last call."""
        known, self._states = self._states, dict(states)
        for home, state in states.items():
            self._record(home, known.get(home), state)

    def _record(
        self, home: ClusterId, before: ShortTermState | None, state: ShortTermState
    ) -> None:
        for link_id, link in state.links.items():
            known = LinkState() if before is None else before.links.get(link_id) or LinkState()
            self._record_verdict(link_id, known, link)
            self._record_rate(link_id, link)
        if before is not None and before.threshold_factor != state.threshold_factor:
            self._factor_changes += 1
            log.info(
                "%s: the threshold factor changed to %g from %g: %s",
                home,
                state.threshold_factor,
                before.threshold_factor,
                state.cause,
                extra=with_fields(
                    event="threshold",
                    home=home,
                    factor=state.threshold_factor,
                    factor_before=before.threshold_factor,
                    cause=state.cause,
                ),
            )

    def _record_verdict(self, link_id: LinkId, known: LinkState, link: LinkState) -> None:
        if link.health.verdict is known.health.verdict:
            return
        cause = link.health.cause or known.health.cause
        self._changes[link_id, link.health.verdict.name.lower(), cause] += 1
        level = logging.INFO if link.health.verdict is LinkVerdict.CLEAR else logging.WARNING
        log.log(
            level,
            "link %s -> %s is %s; it was %s",
            *link_id,
            link.health.described,
            known.health.described,
            extra=with_fields(
                event="verdict",
                source=link_id[0],
                target=link_id[1],
                verdict=link.health.verdict.name.lower(),
                verdict_before=known.health.verdict.name.lower(),
                cause=cause,
            ),
        )

    def _record_rate(self, link_id: LinkId, link: LinkState) -> None:
        logged = self._logged_bps.get(link_id)
        if link.bps is None:
            if logged is not None:
                log.info("link %s -> %s: estimated rate reset to the configured rate", *link_id)
        elif logged is None or not logged / _NOTABLE_RATIO <= link.bps <= logged * _NOTABLE_RATIO:
            log.info(
                "link %s -> %s: estimated rate %.3g Mbit/s, as delivered while bytes waited",
                *link_id,
                link.bps / 1e6,
            )
        else:
            return
        self._logged_bps[link_id] = link.bps

    def metrics(self) -> Iterator[Metric]:
        """What has changed; `exposition` has the present verdicts, rates and factors."""
        changes = counter(
            "link_verdict_changes",
            "Changes of the verdict on a link, by the new verdict and the signal that caused it.",
            *("source", "target", "verdict", "cause"),
        )
        for (link_id, name, cause), number in self._changes.items():
            changes.add_metric([*link_id, name, cause], number)
        yield changes
        yield counter(
            "threshold_factor_changes",
            "Changes of the factor of the plan's threshold.",
            value=self._factor_changes,
        )
