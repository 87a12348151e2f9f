"""Sends the spans of sampled requests to the exporter when they end, and lets several observers see
every request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from prfaas.clock import Clock
from prfaas.gateway.api.metrics import RequestRecord
from prfaas.gateway.api.request_log import RequestObserver
from prfaas.gateway.following.kept_requests import KeptRequest
from prfaas.gateway.following.request_spans import request_spans
from prfaas.tracing.epoch import EpochOffset
from prfaas.tracing.recorder import SpanExporter

_LOG = logging.getLogger(__name__)


class RequestExport:
    """A `RequestObserver`."""

    def __init__(
        self,
        exporter: SpanExporter,
        model: str,
        clock: Clock,
        epoch: Callable[[], float] = time.time,
    ) -> None:
        self._exporter = exporter
        self._model = model
        self._to_epoch = EpochOffset(clock, epoch)
        self._failed = False  # once: it is logged

    def begin(self, record: RequestRecord) -> None:
        pass

    def end(self, record: RequestRecord, outcome: str, error_text: str, now_s: float) -> None:
        if not record.trace.context.sampled:
            return
        try:
            kept = KeptRequest(record, outcome, error_text, now_s)
            for span in request_spans(kept, self._model, self._to_epoch.seconds()):
                self._exporter.export(span)
        except Exception:  # a defect here must not fail a request that was served
            if not self._failed:
                self._failed = True
                _LOG.exception("the spans of request %s were not exported", record.id)


class Observers:
    """Several observers, which see the same requests."""

    def __init__(self, observers: Sequence[RequestObserver]) -> None:
        self._observers = observers

    def begin(self, record: RequestRecord) -> None:
        for observer in self._observers:
            observer.begin(record)

    def end(self, record: RequestRecord, outcome: str, error_text: str, now_s: float) -> None:
        for observer in self._observers:
            observer.end(record, outcome, error_text, now_s)
