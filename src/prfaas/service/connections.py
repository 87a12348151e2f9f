"""The connections of a service's HTTP port: how many there may be, and which one is closed for the
next. Pure: no sockets and no clock.

A descriptor is a resource of the whole process. Whoever opens connections and sends nothing must
not take the last one, so a connection is worth what it has shown:

    new        accepted; no request has arrived yet, perhaps not even a TLS handshake
    stranger   no request with an accepted key was answered yet
    known      a request with a key was answered

A connection with a request under way is never closed for another one.

For a connection above a bound the oldest new one is closed, then the oldest stranger, then the
oldest known one; a client repeats a request that meets the end of an idle connection. Where
requests are under way on all that are looked at, 64 of each stage at most, the connection that has
just arrived is closed; the next search looks at others. The oldest is the one
that was accepted first, or on which a request was under way when the last one was chosen: queues
change for a connection's first requests only, so that the others cost next to nothing.
"""

from __future__ import annotations

import enum
import ipaddress
import resource
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TypeAlias

MOST = 8_192  # connections of one service, however many descriptors it may have
# Descriptors for the process itself: logs, workers, event loop, files, calls to other processes.
RESERVED = 64
MEMORY_BYTES = 112 << 10  # that a connection takes: TLS (104 KB), the parser and both buffers
WARN_AT = 0.8  # of a bound
_QUIET_BELOW = 0.6  # after a warning, of the same bound
_PREFIX_BITS = 64  # a host has all IPv6 addresses with its first 64 bits
_Network: TypeAlias = ipaddress.IPv4Network | ipaddress.IPv6Network


@dataclass(frozen=True, slots=True)
class Bounds:
    """The most connections of a service at a time."""

    total: int

    @property
    def per_address(self) -> int:
        return max(1, self.total // 2)

    @property
    def new(self) -> int:
        return max(1, self.total // 2)

    @property
    def new_per_address(self) -> int:
        return max(1, self.total // 4)


def most_of_gateway(max_in_flight: int) -> int:
    """One address may have half of them, and half of these without a request."""
    return max(MOST, 4 * max_in_flight)


def bounds_of_process(most: int = MOST) -> Bounds:
    """By this process's limit of descriptors. A request may need another descriptor, for the call
    to a node that it causes, so that connections get half of what is not reserved."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Bounds(most)
    return Bounds(max(1, min(most, (soft - RESERVED) // 2)))


class Proxies:
    """Hosts whose connections are those of many clients: they have no bounds of one address."""

    def __init__(self, networks: Sequence[_Network] = ()) -> None:
        self._networks = networks

    def __contains__(self, host: str) -> bool:
        if not self._networks:
            return False
        address = _parsed(host)
        return address is not None and any(
            address in network for network in self._networks if network.version == address.version
        )


@lru_cache(1024)
def origin(host: str) -> str:
    """What counts as one address: an IPv4 address, or the network of an IPv6 address."""
    address = _parsed(host)
    if not isinstance(address, ipaddress.IPv6Address):
        return host if address is None else str(address)
    return str(ipaddress.ip_network((address, _PREFIX_BITS), strict=False))


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host.partition("%")[0])  # without the scope
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return address if mapped is None else mapped


class Stage(enum.Enum):
    NEW = "new"
    STRANGER = "stranger"
    KNOWN = "known"


_CLOSED_FIRST = (Stage.NEW, Stage.STRANGER, Stage.KNOWN)
MOST_LOOKS = 64  # at busy connections, for one idle one


class Reason(enum.Enum):
    """Why a connection was closed. The label of a metric."""

    ADDRESS = "address"  # its address had too many
    TOTAL = "total"  # the service had too many
    SLOW = "slow"  # its first request did not arrive in time
    DESCRIPTORS = "descriptors"  # the process had no descriptor left


@dataclass(slots=True, eq=False)
class Connection:
    origin: str
    trusted: bool  # a proxy's, which is never closed for another one
    stage: Stage = Stage.NEW
    busy: bool = False  # a request is under way
    counted: bool = True  # it is in the table


@dataclass(slots=True)
class _Scope:
    """The connections of the service, or of one address."""

    count: int = 0
    warned: bool = False
    # Each queue begins with the oldest. Connections of proxies are in none.
    queues: dict[Stage, OrderedDict[Connection, None]] = field(
        default_factory=lambda: {stage: OrderedDict() for stage in _CLOSED_FIRST}
    )

    def victim(self, most: int, most_new: int) -> Connection | None:
        """What has to be closed for one more connection. None also when nothing may be closed."""
        if self.count >= most:
            stages: Sequence[Stage] = _CLOSED_FIRST
        elif len(self.queues[Stage.NEW]) >= most_new:
            stages = (Stage.NEW,)
        else:
            return None
        for stage in stages:
            queue = self.queues[stage]
            for _ in range(min(len(queue), MOST_LOOKS)):
                oldest = next(iter(queue))
                if not oldest.busy:
                    return oldest
                queue.move_to_end(oldest)
        return None

    def warn(self, most: int) -> bool:
        """Whether this is the moment for a warning: once, until there are clearly fewer again."""
        warned, few = self.warned, self.count < _QUIET_BELOW * most
        self.warned = not few and (warned or self.count >= WARN_AT * most)
        return self.warned and not warned


@dataclass(frozen=True, slots=True)
class Admission:
    connection: Connection | None  # None: the new one has to be closed
    closed: Sequence[Connection] = ()  # that have to be closed for it
    warning: str = ""


class ConnectionTable:
    """All connections of one service."""

    def __init__(self, bounds: Bounds, proxies: Proxies | None = None) -> None:
        self.bounds = bounds
        self.closed: Counter[Reason] = Counter()
        self._proxies = proxies or Proxies()
        self._all = _Scope()
        self._addresses: dict[str, _Scope] = {}

    def __len__(self) -> int:
        return self._all.count

    def admit(self, host: str) -> Admission:
        """A connection from `host` has been accepted."""
        made = Connection(origin(host), host in self._proxies)
        bounds, closed = self.bounds, list[Connection]()
        levels = [(bounds.total, bounds.new, Reason.TOTAL)]
        if not made.trusted:
            levels.insert(0, (bounds.per_address, bounds.new_per_address, Reason.ADDRESS))
        for most, most_new, reason in levels:
            own = reason is Reason.ADDRESS
            scope = self._addresses.get(made.origin, _NONE) if own else self._all
            victim = scope.victim(most, most_new)
            if victim is not None:
                self.remove(victim)
                closed.append(victim)
                self.closed[reason] += 1
            elif scope.count >= most:
                self.closed[reason] += 1
                return Admission(None, closed)
        if not made.trusted:
            self._addresses.setdefault(made.origin, _Scope())
        for scope in self._scopes(made):
            scope.count += 1
            self._enqueue(scope, made)
        return Admission(made, closed, self._warning(made))

    def begin(self, connection: Connection) -> None:
        """A request has arrived on the connection."""
        connection.busy = True
        if connection.stage is Stage.NEW:
            self._move(connection, Stage.STRANGER)

    def end(self, connection: Connection, *, known: bool) -> None:
        """The request has ended. `known`: it had a key, and was answered without an error."""
        connection.busy = False
        if known and connection.stage is Stage.STRANGER:
            self._move(connection, Stage.KNOWN)

    def close_slow(self, connection: Connection) -> bool:
        """The time for the first request is over. Whether the connection has to be closed."""
        if connection.stage is not Stage.NEW or not self.remove(connection):
            return False
        self.closed[Reason.SLOW] += 1
        return True

    def make_room(self) -> Connection | None:
        """The process has no descriptor left: the connection that has to be closed, if any."""
        victim = self._all.victim(0, 0)
        if victim is not None:
            self.remove(victim)
            self.closed[Reason.DESCRIPTORS] += 1
        return victim

    def remove(self, connection: Connection) -> bool:
        """The connection has ended. False where the table has closed it before."""
        if not connection.counted:
            return False
        for scope in self._scopes(connection):
            scope.count -= 1
            self._dequeue(scope, connection)
        connection.counted = False
        own = self._addresses.get(connection.origin)
        if own is not None and not own.count:
            del self._addresses[connection.origin]
        return True

    def check(self) -> None:
        """Asserts the invariants of the table."""
        assert self._all.count <= self.bounds.total
        assert all(0 < a.count <= self.bounds.per_address for a in self._addresses.values())
        for scope in (self._all, *self._addresses.values()):
            queued = [(stage, c) for stage, queue in scope.queues.items() for c in queue]
            assert len(queued) <= scope.count
            assert all(c.counted and c.stage is stage for stage, c in queued)
        assert len(self._all.queues[Stage.NEW]) <= self.bounds.new

    def _scopes(self, connection: Connection) -> list[_Scope]:
        own = [] if connection.trusted else [self._addresses[connection.origin]]
        return [self._all, *own]

    def _move(self, connection: Connection, stage: Stage) -> None:
        scopes = self._scopes(connection) if connection.counted else []
        for scope in scopes:
            self._dequeue(scope, connection)
        connection.stage = stage
        for scope in scopes:
            self._enqueue(scope, connection)

    def _enqueue(self, scope: _Scope, connection: Connection) -> None:
        if not connection.trusted:
            scope.queues[connection.stage][connection] = None

    def _dequeue(self, scope: _Scope, connection: Connection) -> None:
        if not connection.trusted:
            del scope.queues[connection.stage][connection]

    def _warning(self, made: Connection) -> str:
        bounds = self.bounds
        if self._all.warn(bounds.total):
            return f"{self._all.count} connections, and the most is {bounds.total}"
        if made.trusted or not self._addresses[made.origin].warn(bounds.per_address):
            return ""
        return (
            f"{self._addresses[made.origin].count} connections from {made.origin}, and the most "
            f"from one address is {bounds.per_address}"
        )


_NONE = _Scope()  # of an address without connections; never changed
