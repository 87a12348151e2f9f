"""Every error this project raises on purpose.

    PrfaasError
    ├── InputError          a file, key, line or flag is wrong: says which one, and what to do
    ├── EngineError         one job could not be computed; other jobs are unharmed
    └── PeerError           another process broke a rule, or went away
        ├── ConnectionLost  a connection that cannot be made, broke, or fell silent
        ├── WireError       bytes that are not our protocol, or break its limits
        └── TransferFailed  a transfer ended without a commit: says why

An expected "not now" is a value (`prfaas.types.NotNow`), not an exception; a broken invariant of
our own is an `assert`. The CLI turns `InputError` into one line on stderr and exit code 2.
"""

from __future__ import annotations

from pathlib import Path


class PrfaasError(Exception):
    """Base of all errors raised on purpose."""


class InputError(PrfaasError):
    """Bad input from a person. `str()` is one line: where, what is wrong, what to do."""

    def __init__(
        self,
        problem: str,
        *,
        file: str | Path | None = None,
        where: str | None = None,
        fix: str | None = None,
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.file = None if file is None else str(file)
        self.where = where
        self.fix = fix

    def __str__(self) -> str:
        parts = [part for part in (self.file, self.where, self.problem) if part]
        line = ": ".join(parts)
        return f"{line}; {self.fix}" if self.fix else line

    def in_file(self, file: str | Path) -> InputError:
        """The same error, said of `file`; an error that already names its file keeps it."""
        return InputError(self.problem, file=self.file or file, where=self.where, fix=self.fix)


class EngineError(PrfaasError):
    """One job could not be computed: its sink or source failed, or its state is not its prompt's.
    Other jobs are unharmed."""


class PeerError(PrfaasError):
    """Another process broke a rule, or went away. Nothing of ours is wrong."""


class ConnectionLost(PeerError):
    """A connection that cannot be made, broke, or fell silent for too long."""


class WireError(PeerError):
    """Bytes that are not our protocol, or break its limits; the connection is of no more use."""


class TransferFailed(PeerError):
    """A transfer ended without a commit. The receiver has given its memory back, or will."""
