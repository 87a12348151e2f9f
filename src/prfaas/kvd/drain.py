"""A kvd that stops: it grants nothing new and finishes its transfers."""

from __future__ import annotations

import asyncio
import logging

from prfaas.kvd.engine_socket.server import EngineSocketServer
from prfaas.kvd.transfers.incoming import IncomingTransfers
from prfaas.kvd.transfers.outgoing import OutgoingTransfers
from prfaas.types import NotNow

_LOG = logging.getLogger(__name__)
_POLL_S = 0.02
_STOPPING = NotNow("this kvd is stopping", 1.0)


class Drain:
    def __init__(
        self,
        incoming: IncomingTransfers,
        outgoing: OutgoingTransfers,
        engines: EngineSocketServer,
    ) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._engines = engines

    async def run(self, patience_s: float) -> None:
        """Returns when every transfer has ended and no engine holds a lease, or after
        `patience_s`. Other kvds may still pull prefixes from here: a gateway copies the hot ones
        away."""
        self._incoming.refuse_new(_STOPPING)
        try:
            async with asyncio.timeout(patience_s):
                while True:
                    if self._is_done():
                        return
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            _LOG.warning(
                "%d incoming and %d outgoing transfers did not end within %g s",
                self._arriving(),
                self._leaving(),
                patience_s,
            )

    def _is_done(self) -> bool:
        if self._leaving() or len(self._engines.holders):
            return False
        # Without an engine no process can use what still arrives, and the pool ends with the kvd.
        return not self._engines.connected or not self._arriving()

    def _arriving(self) -> int:
        counts = self._incoming.counts()
        return counts["granted"] + counts["committed"] + counts["attached"]

    def _leaving(self) -> int:
        counts = self._outgoing.counts()
        return counts["writing"] + counts["sending"]
