"""States of transfers and leases as explicit transitions. Pure: no pages, no sockets, no clock.

incoming   granted ──► committed ──► attached ──► released
              └────────────┴──► failed               Frames renew the grant until the commit, the
                                                      gateway's polls until the attach; then the
                                                      pages belong to the engine's request, which
                                                      may attach them several times.
outgoing   writing ──► committed | aborted            The engine's part, and at the same time
           sending ──► sent | failed                  the link's. Pages are free when both ended.
"""

from __future__ import annotations

import enum

from prfaas.errors import TransferFailed


class IncomingStage(enum.Enum):
    GRANTED = "granted"
    COMMITTED = "committed"
    ATTACHED = "attached"
    RELEASED = "released"
    FAILED = "failed"


class IncomingState:
    """The state of one incoming transfer.

    `aborting` has the reason of an abort from the moment of the abort until the listener reports
    that no connection writes to the pages any more.
    """

    def __init__(self, dispatch_s: float) -> None:
        self.stage = IncomingStage.GRANTED
        self.reason = ""
        self.aborting: str | None = None
        self._dispatch_s = dispatch_s  # how long a committed transfer waits for the next poll
        self._deadline_s = 0.0  # valid in COMMITTED, and while attachments are awaited
        self._attached = 0  # attachments that are not released
        self._awaited = 0  # attachments that were declared and have not come

    def commit(self, now: float) -> bool:
        """Every byte is in place. False when the transfer was aborted before: it has failed."""
        assert self.stage is IncomingStage.GRANTED, self.stage
        if self.aborting is not None:
            self.fail(self.aborting)
            return False
        self.stage = IncomingStage.COMMITTED
        self._deadline_s = now + self._dispatch_s
        return True

    def fail(self, reason: str) -> None:
        """Only before an engine has attached it, when nothing writes to the pages any more."""
        assert self.stage in (IncomingStage.GRANTED, IncomingStage.COMMITTED), self.stage
        self.stage = IncomingStage.FAILED
        self.reason = self.aborting or reason

    def renew(self, now: float) -> None:
        """A gateway has polled: the request still needs the transfer."""
        if self.stage is IncomingStage.COMMITTED:
            self._deadline_s = now + self._dispatch_s

    def expired(self, now: float) -> bool:
        return self.stage is IncomingStage.COMMITTED and now >= self._deadline_s

    def attach(self, now: float, attachments: int = 1) -> None:
        """The first call declares the number of `attachments`, itself included. Later calls must
        come within `dispatch_s` after it."""
        match self.stage:
            case IncomingStage.COMMITTED:
                self.stage = IncomingStage.ATTACHED
                self._attached, self._awaited = 1, attachments - 1
                self._deadline_s = now + self._dispatch_s
            case IncomingStage.ATTACHED if self._awaited:
                self._attached += 1
                self._awaited -= 1
            case IncomingStage.GRANTED:
                raise TransferFailed("the transfer is not committed yet")
            case IncomingStage.FAILED:
                raise TransferFailed(f"the transfer has failed: {self.reason}")
            case _:
                raise TransferFailed("an engine has already attached the transfer")

    def release(self, problem: str = "") -> bool:
        """Ends one attachment. True when it was the last one: the pages are free."""
        assert self.stage is IncomingStage.ATTACHED and self._attached, self.stage
        self._attached -= 1
        self.reason = self.reason or problem
        return self._end_attached()

    def lacks_attachments(self, now: float) -> bool:
        """Attachments that were declared have not come in time."""
        return self._awaited > 0 and now >= self._deadline_s

    def await_no_more(self) -> bool:
        """No further attachment will come. True when none is left: the pages are free."""
        if not self._awaited:
            return False
        self._awaited = 0
        return self._end_attached()

    def _end_attached(self) -> bool:
        if self._attached or self._awaited:
            return False
        self.stage = IncomingStage.RELEASED
        return True


class WriteStage(enum.Enum):
    WRITING = "writing"
    COMMITTED = "committed"
    ABORTED = "aborted"


class SendStage(enum.Enum):
    NONE = "none"  # the lease has no transfer
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"


class OutgoingState:
    """The state of a lease that an engine fills and that a transfer may read at the same time."""

    def __init__(self, *, sending: bool) -> None:
        self.write = WriteStage.WRITING
        self.send = SendStage.SENDING if sending else SendStage.NONE

    @property
    def free(self) -> bool:
        """Neither the engine nor a link uses the pages any more."""
        return self.write is not WriteStage.WRITING and self.send is not SendStage.SENDING

    @property
    def writing(self) -> bool:
        """The engine may still write to the pages."""
        return self.write is WriteStage.WRITING

    def commit_write(self) -> None:
        assert self.write is WriteStage.WRITING, self.write
        self.write = WriteStage.COMMITTED

    def abort_write(self) -> bool:
        """The engine has stopped writing. True when a transfer is in progress: the caller aborts
        it as well."""
        assert self.write is WriteStage.WRITING, self.write
        self.write = WriteStage.ABORTED
        return self.send is SendStage.SENDING

    def end_send(self, reason: str) -> None:
        """The transfer has ended. An empty reason: the receiver has committed it."""
        assert self.send is SendStage.SENDING, self.send
        self.send = SendStage.FAILED if reason else SendStage.SENT
