"""The lives of transfers and leases as explicit transitions. Pure: no pages, no sockets, no clock.

incoming   granted ──► committed ──► attached ──► released
              └────────────┴──► failed               frames renew until commit, the gateway's
                                                      poll until attach, then the engine owns it
writing    writing ──► committed | aborted            and beside it
           sending ──► sent | failed                  pages are free when both are over
"""

from __future__ import annotations

import enum

from prfaas.errors import TransferFailed


class Stage(enum.Enum):
    GRANTED = "granted"
    COMMITTED = "committed"
    ATTACHED = "attached"
    RELEASED = "released"
    FAILED = "failed"


class IncomingLife:
    """`aborting` is set between an abort and the moment when nobody writes any more."""

    def __init__(self, dispatch_s: float) -> None:
        self.stage = Stage.GRANTED
        self.reason = ""
        self.aborting: str | None = None
        self._dispatch_s = dispatch_s  # how long a commit waits for the gateway's next word
        self._deadline_s = 0.0  # meant for COMMITTED only

    def committed(self, now: float) -> bool:
        """Everything is in place. False when it was aborted meanwhile: it has failed."""
        assert self.stage is Stage.GRANTED, self.stage
        if self.aborting is not None:
            self.failed(self.aborting)
            return False
        self.stage = Stage.COMMITTED
        self._deadline_s = now + self._dispatch_s
        return True

    def failed(self, reason: str) -> None:
        """Before an engine has it: nobody writes or reads any more."""
        assert self.stage in (Stage.GRANTED, Stage.COMMITTED), self.stage
        self.stage = Stage.FAILED
        self.reason = self.aborting or reason

    def polled(self, now: float) -> None:
        """The gateway has asked: it still wants it."""
        if self.stage is Stage.COMMITTED:
            self._deadline_s = now + self._dispatch_s

    def expired(self, now: float) -> bool:
        return self.stage is Stage.COMMITTED and now >= self._deadline_s

    def attach(self) -> None:
        match self.stage:
            case Stage.COMMITTED:
                self.stage = Stage.ATTACHED
            case Stage.GRANTED:
                raise TransferFailed("the transfer is not committed yet")
            case Stage.FAILED:
                raise TransferFailed(f"the transfer has failed: {self.reason}")
            case _:
                raise TransferFailed("the transfer was attached before")

    def release(self) -> None:
        assert self.stage is Stage.ATTACHED, self.stage
        self.stage = Stage.RELEASED


class Writer(enum.Enum):
    WRITING = "writing"
    COMMITTED = "committed"
    ABORTED = "aborted"


class Sender(enum.Enum):
    NONE = "none"  # no transfer
    SENDING = "sending"
    SENT = "sent"
    FAILED = "failed"


class WritingLife:
    """A lease that is filled: by an engine, perhaps read by a transfer at the same time."""

    def __init__(self, *, sending: bool) -> None:
        self.writer = Writer.WRITING
        self.sender = Sender.SENDING if sending else Sender.NONE

    @property
    def free(self) -> bool:
        """Nobody writes to its pages or reads them any more."""
        return self.writer is not Writer.WRITING and self.sender is not Sender.SENDING

    def written(self) -> None:
        assert self.writer is Writer.WRITING, self.writer
        self.writer = Writer.COMMITTED

    def aborted(self) -> bool:
        """The writer has stopped. True when a transfer is under way, to be aborted too."""
        assert self.writer is Writer.WRITING, self.writer
        self.writer = Writer.ABORTED
        return self.sender is Sender.SENDING

    def sent(self, reason: str) -> None:
        """The transfer has ended; an empty reason: committed."""
        assert self.sender is Sender.SENDING, self.sender
        self.sender = Sender.FAILED if reason else Sender.SENT
