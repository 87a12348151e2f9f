"""Every error that this project raises on purpose.

    PrfaasError
    ├── InputError              a file, key, line or flag is wrong; has its name and a fix
    │   └── PeerForbidden       a request names a host that this process must not talk to
    ├── EngineError             one job could not be computed; other jobs are unharmed
    ├── StreamBroken            the engine was lost after the first token of a response
    ├── CaseFailed              a case of a study raised an error, or its worker died
    ├── HttpError               an HTTP error response: status, code, message
    │   ├── RequestError        this process ends a client's request with it
    │   └── PeerHttpError       a peer ended this process's request with it; a PeerError, too
    │       └── MalformedResponse    the response breaks its contract or its limits
    └── PeerError               another process broke a rule, or went away
        ├── ConnectionLost      a connection could not be made, broke, or was silent for too long
        │   ├── ResponseLate    the peer has the request, and did not answer in time
        │   └── Unreachable     a connection could not be made
        │       └── Refused     the peer's host refuses connections
        ├── PeerHttpError       see above
        ├── WireError           bytes that are not our protocol, or break its limits
        └── TransferFailed      a transfer ended without a commit; has the reason

Errors of one package are defined in the module that raises them:

    prfaas.cache.hashing.wire_blocks.TooManyChanges    one payload of an engine's events is too much
    prfaas.engine.warm_up._TimedOut                    a job of the warm-up did not end in time
    prfaas.gateway.api.content_encoding.TooManyBytes   a decompressed body exceeds a limit
    prfaas.gateway.api.response_stream._Stalled        the client stopped reading its response
    prfaas.gateway.body_workers.process.WorkerLost     the process that read a body ended
    prfaas.gateway.body_workers.process._NotSent       a body worker had ended before its job
    prfaas.gateway.console.sessions.TooManyFailures    too many logins to the console have failed
    prfaas.gateway.dispatch.handoff.AttemptFailed      an attempt failed before the first token
    prfaas.gateway.dispatch.handoff.DecodeNodeFull     the decode node has no memory for it now
    prfaas.gateway.fleet.liveness.FellSilent           a node that a call waits for is silent
    prfaas.gateway.fleet.membership.TooManyMembers     so many kvds registered that no more may
    prfaas.service.request_body.DamagedBody            a body did not arrive as it was sent
    prfaas.transport.workers.connection._Finished      the kvd needs a worker's connection no more
    prfaas.launch.children.ChildDied                   a process of a deployment ended unexpectedly

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
        """The same error with `file` as its file; an error that already names a file keeps it."""
        return InputError(self.problem, file=self.file or file, where=self.where, fix=self.fix)


class PeerForbidden(InputError):
    """A request names a host that this process must not send KV to or request it from."""


class EngineError(PrfaasError):
    """One job could not be computed: its sink or source failed, or its state is not its prompt's.
    Other jobs are unharmed."""


class StreamBroken(PrfaasError):
    """The decode engine was lost after the first token. The client receives an error event."""


class CaseFailed(PrfaasError):
    """A case of a study raised an error, or its worker died. `str()` names the case; `trace` is
    what the worker was doing, where that is known."""

    def __init__(self, problem: str, trace: str = "") -> None:
        super().__init__(problem)
        self.trace = trace

    def text(self) -> str:
        """What a command prints on stderr."""
        return f"{self.trace}error: {self}"


class HttpError(PrfaasError):
    """An HTTP error response, sent or received. `code` is a word for programs, empty when the
    sender gave none; `param` names the request's field that is wrong."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class RequestError(HttpError):
    """This process ends a client's request with an error, before the first token of a response."""


class PeerError(PrfaasError):
    """Another process broke a rule, or went away. This process is not at fault."""


class PeerHttpError(HttpError, PeerError):
    """A peer answered a request of this process with an error. `str()` has the peer's own words,
    for this process's log and for parties that may read the peer's responses."""

    @property
    def without_body(self) -> str:
        """What may be told to a party that cannot ask the peer itself: nothing of the response's
        body. A party that names a URL would otherwise read that URL through this process."""
        return f"responded with HTTP status {self.status}"


class MalformedResponse(PeerHttpError):
    """A peer's response breaks its contract: it is too large, is not JSON, or a field is wrong."""

    def __init__(self, message: str) -> None:
        super().__init__(502, "", message)

    @property
    def without_body(self) -> str:
        return "sent an unexpected response"


class ConnectionLost(PeerError):
    """A connection could not be made, broke, or was silent for too long."""


class ResponseLate(ConnectionLost):
    """The peer has the request, and was silent for too long: it is slow, or hangs."""


class Unreachable(ConnectionLost):
    """No connection to the peer could be made: it refuses them, or its host does not answer."""


class Refused(Unreachable):
    """The peer's host refuses connections: no process listens at the address."""


class WireError(PeerError):
    """Bytes that are not our protocol, or break its limits; the connection cannot be used again."""


class TransferFailed(PeerError):
    """A transfer ended without a commit. The receiver has freed its memory, or will."""

    def __init__(self, *args: object, arrived_bytes: int = 0) -> None:
        super().__init__(*args)
        self.arrived_bytes = arrived_bytes  # before it ended, as the receiver has reported
