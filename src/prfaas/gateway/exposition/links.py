"""Metrics of the links between clusters, as the gateway sees them: a link's report is the sum over
the kvds that send over it, and its verdict decides where requests go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client.core import Metric

from prfaas.gateway.exposition.families import counter, gauge
from prfaas.scheduler.state import LinkState
from prfaas.scheduler.view import LinkId, LinkView

_BITS = 8  # of a byte: Prometheus' base unit is the byte


class ObservedLink(NamedTuple):
    link_id: LinkId
    view: LinkView
    state: LinkState
    cuts: int  # how often it was found cut


def link_metrics(links: Iterable[ObservedLink]) -> Iterator[Metric]:
    """The clusters of the deployment file bound the number of series."""
    labels = ("source", "target")
    up = gauge("link_up", "Whether the link carries bytes: 1, or 0 while it is cut.", *labels)
    cuts = counter(
        "link_cuts",
        "How often the link was found cut. A link without anything to send counts as up.",
        *labels,
    )
    verdict = gauge(
        "link_verdict", "The verdict on the link: 0 clear, 1 building, 2 congested.", *labels
    )
    capacity = gauge(
        "link_capacity_bytes_per_second",
        "The rate of the link in the deployment file.",
        *labels,
    )
    estimated = gauge(
        "link_estimated_bytes_per_second",
        "The rate that the link delivered while bytes waited. The series is absent while nothing "
        "speaks against the rate of the deployment file.",
        *labels,
    )
    goodput = gauge(
        "link_goodput_bytes_per_second",
        "The rate at which KV bytes arrived over the link in the latest report.",
        *labels,
    )
    backlog = gauge(
        "link_backlog_bytes",
        "KV bytes that the kvds have handed to the link and that have not arrived yet.",
        *labels,
    )
    pending = gauge(
        "link_pending_bytes",
        "KV bytes of this gateway's hand-offs over the link that are not in place yet. They "
        "include bytes that are not computed yet.",
        *labels,
    )
    waited = gauge(
        "link_waited_seconds",
        "How long the oldest byte of the backlog has waited for the link.",
        *labels,
    )
    rtt = gauge("link_rtt_seconds", "The round-trip time of the link.", *labels)
    loss = gauge(
        "link_loss_ratio",
        "The share of segments that were lost and sent again, smoothed. The series is absent until "
        "a kvd has reported it.",
        *labels,
    )
    for link_id, view, state, found_cut in links:
        stats, health = view.stats, state.health
        up.add_metric(link_id, view.up)
        cuts.add_metric(link_id, found_cut)
        verdict.add_metric(link_id, health.verdict.value)
        capacity.add_metric(link_id, view.capacity_bps / _BITS)
        if state.bps is not None:
            estimated.add_metric(link_id, state.bps / _BITS)
        goodput.add_metric(link_id, 0.0 if stats is None else stats.goodput_bps / _BITS)
        backlog.add_metric(link_id, 0 if stats is None else stats.backlog_bytes)
        pending.add_metric(link_id, view.pending_bytes)
        waited.add_metric(link_id, 0.0 if stats is None else stats.waited_s)
        measured_s = None if stats is None else stats.rtt_s
        rtt.add_metric(link_id, view.rtt_s if measured_s is None else measured_s)
        if health.loss is not None:
            loss.add_metric(link_id, health.loss)
    yield from (up, cuts, verdict, capacity, estimated, goodput)
    yield from (backlog, pending, waited, rtt, loss)
