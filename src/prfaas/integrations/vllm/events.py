"""Reads vLLM's cache events from its publisher on this host and sends them to the kvd.

The kvd serves block hashes to gateways; the events' token ids stay on this host. An event that the
kvd cannot read leaves a gap in its numbers, and gateways get a snapshot. An event that cannot be
sent to the kvd is lost and logged.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import zmq

from prfaas.integrations.vllm.caches.groups import CacheLayout
from prfaas.kvd.engine_socket.client import KvdClient

_LOG = logging.getLogger(__name__)
_POLL_MS = 200  # how soon `close` takes effect


class EventRelay:
    def __init__(self, endpoint: str, topic: str, kvd: KvdClient, layout: CacheLayout) -> None:
        self._endpoint = endpoint.replace("*", "127.0.0.1")
        self._topic = topic
        self._kvd = kvd
        # Without its hybrid cache manager vLLM keeps layers of several groups in one.
        self._names: dict[int, tuple[str, ...]] = {}
        for group in layout.groups:
            self._names[group.index] = (*self._names.get(group.index, ()), group.spec.name)
        # The native form names prefixes by vLLM's own blocks.
        self._block_tokens = layout.block_tokens if layout.whole == 1 else 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prfaas-events", daemon=True)
        self._thread.start()

    @classmethod
    def of(cls, config: Any, kvd: KvdClient, layout: CacheLayout) -> EventRelay | None:
        """None unless vLLM publishes events over ZMQ."""
        if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
            return None
        return cls(config.endpoint, config.topic, kvd, layout)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        context = zmq.Context()
        socket = context.socket(zmq.SUB)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt_string(zmq.SUBSCRIBE, self._topic)
        socket.connect(self._endpoint)
        try:
            while not self._stop.is_set():
                if socket.poll(_POLL_MS):
                    self._pass_on(socket.recv_multipart()[-1])
        finally:
            socket.close()
            context.term()

    def _pass_on(self, payload: bytes) -> None:
        try:
            self._kvd.publish(payload, self._names, self._block_tokens)
        except Exception as error:  # the next payload may be readable
            _LOG.warning("lost cache events: %r", error)
