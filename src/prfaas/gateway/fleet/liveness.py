"""Silent nodes: calls that wait for a node which does not answer are ended, and continue elsewhere.

A process that is stopped keeps its connections open, so that a call to it would wait until its
timeout. Two verdicts end the wait earlier:

    silent    `silent_s`: calls without a first token are retried elsewhere, and new requests avoid
              the node
    hung      `hung_s`: streams that have begun end with an error. They cannot be continued
              elsewhere, and so they get more time

A first token has to come from elsewhere within 3 s after a node has stopped. The times add up so:

    0.3 s     until the node is asked (`PROBE_S`, and `CHECK_S` until the check that notices it)
    1.5 s     `silent_s`
    0.1 s     `CHECK_S`: the check that finds it silent ends the calls
    1.1 s     remain for the retry: route, connections, grant, prefill, commit and first token

`polling.Poller` asks, listens and checks; this module keeps the books.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType

from prfaas.clock import Clock
from prfaas.gateway.fleet.member import Contact, Member, member_fields
from prfaas.gateway.fleet.membership import Membership
from prfaas.types import NodeId

log = logging.getLogger(__name__)

CHECK_S = 0.1  # the interval of the checks
PROBE_S = 0.2  # a process that a call waits for is asked when nothing has arrived for this long
_GONE = ""  # stands for the address of a node that is not a member


class FellSilent(Exception):
    """A node that a call waits for has fallen silent."""

    def __init__(self, node: NodeId) -> None:
        super().__init__(f"{node} has fallen silent")
        self.node = node


class Liveness:
    def __init__(self, members: Membership, clock: Clock) -> None:
        self._members = members
        self._clock = clock
        # By the kvd's address, and by whether the answer streams already: what ends each waiting
        # call. Not by the node's name, which another process may take over.
        self._waiting: dict[tuple[str, bool], set[Callable[[], None]]] = {}
        self._silent: set[str] = set()  # by the kvd's address
        self.fallen_silent = 0  # how often a node was found silent

    def unless_silent(self, *nodes: NodeId) -> _Waiting:
        """An asynchronous context for calls without a first token. When one of the nodes falls
        silent, what is awaited in it is cancelled, and it raises `FellSilent`."""
        return _Waiting(self, nodes)

    @contextmanager
    def cancel_when_hung(self, node: NodeId, cancel: Callable[[], None]) -> Iterator[None]:
        """A context in which `cancel` is called, at most once, when the node's engine has hung."""
        key = self.wait(node, cancel, begun=True)
        try:
            yield
        finally:
            self.end_wait(key, cancel)

    def wait(self, node: NodeId, cancel: Callable[[], None], *, begun: bool) -> tuple[str, bool]:
        """Calls `cancel`, at most once, when the node is silent or, after the answer has `begun`,
        when its engine has hung. Returns a key for `end_wait`."""
        member = self._members.named(node)
        key = (_GONE if member is None else member.kvd_url, begun)
        self._waiting.setdefault(key, set()).add(cancel)
        return key

    def end_wait(self, key: tuple[str, bool], cancel: Callable[[], None]) -> None:
        waiting = self._waiting.get(key)
        if waiting is not None:
            waiting.discard(cancel)
            if not waiting:
                del self._waiting[key]

    def awaited(self) -> list[tuple[Member, bool]]:
        """The members that calls wait for, and whether only answers that have begun do."""
        found = []
        for url, begun in self._waiting:
            member = self._members.at(url)
            if member is not None and not (begun and (url, False) in self._waiting):
                found.append((member, begun))
        return found

    def changed_verdicts(self) -> list[tuple[Member, bool]]:
        """Members that have fallen silent since the previous call, and those that answer again."""
        now_s = self._clock.now()
        changed = []
        for member in self._members:
            silent = member.is_silent(now_s)
            if silent == (member.kvd_url in self._silent):
                continue
            changed.append((member, silent))
            if silent:
                self._silent.add(member.kvd_url)
                self.fallen_silent += 1
                log.warning(
                    "%s has fallen silent: %s",
                    _name(member),
                    _silence(member, now_s),
                    extra=member_fields("silent", member),
                )
            else:
                self._silent.discard(member.kvd_url)
                log.info("%s answers again", _name(member), extra=member_fields("answers", member))
        if len(self._silent) > len(self._members):  # some have left
            self._silent &= {member.kvd_url for member in self._members}
        return changed

    def cancel_silent(self) -> None:
        """Ends the calls that wait for silent members, and streams of members that have hung."""
        now_s = self._clock.now()
        # When no member answers, the gateway's own network is the more likely cause, and there is
        # no node that the calls could continue at. They wait for as long as streams do.
        known = [member for member in self._members if member.kvd.is_known]
        alone = all(member.is_silent(now_s) for member in known)
        for key in list(self._waiting):
            url, begun = key
            member = self._members.at(url)
            if member is not None:
                hung = member.has_hung(now_s, engine_only=begun)
                if not hung and (begun or alone or not member.is_silent(now_s)):
                    continue
            waiting = self._waiting.pop(key)
            log.warning(
                "%s %s: cancelling %d calls that wait for it",
                "a node" if member is None else _name(member),
                "has left" if member is None else f"has been silent ({_silence(member, now_s)})",
                len(waiting),
            )
            for cancel in waiting:
                cancel()


class _Waiting:
    """See `Liveness.unless_silent`."""

    def __init__(self, liveness: Liveness, nodes: tuple[NodeId, ...]) -> None:
        self._liveness = liveness
        self._nodes = nodes
        self._scope = asyncio.timeout(None)  # it expires when a node is silent
        self._silent: NodeId | None = None
        self._waits: list[tuple[tuple[str, bool], Callable[[], None]]] = []

    async def __aenter__(self) -> None:
        await self._scope.__aenter__()
        for node in dict.fromkeys(self._nodes):
            end = partial(self._end, node)
            self._waits.append((self._liveness.wait(node, end, begun=False), end))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for key, end in self._waits:
            self._liveness.end_wait(key, end)
        try:
            await self._scope.__aexit__(kind, error, traceback)
        except TimeoutError:
            if self._silent is None:
                raise
            raise FellSilent(self._silent) from None

    def _end(self, node: NodeId) -> None:
        if self._silent is None:
            self._silent = node
            self._scope.reschedule(asyncio.get_running_loop().time())


def _name(member: Member) -> str:
    return member.node or member.kvd_url


def _silence(member: Member, now_s: float) -> str:
    parts: list[tuple[str, Contact]] = [("kvd", member.kvd), ("engine", member.engine)]
    return ", ".join(
        f"{name} {part.silence_s(now_s):.1f} s" for name, part in parts if part.is_known
    )
