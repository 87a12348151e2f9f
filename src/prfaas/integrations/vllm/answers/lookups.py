"""Prefixes in the kvd for requests that are not handed off: what the node has kept serves them too.

The scheduler asks the kvd in a thread. It waits for the answer for a moment, then tells vLLM to ask
again later, and after the setting `lookup_timeout_s` the request is computed without the kvd: a kvd
that does not answer delays no request for longer than that.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

from prfaas.cache.hashing import block_hashes
from prfaas.clock import Clock, MonotonicClock
from prfaas.integrations.vllm.form_access import FormAccess
from prfaas.kvd.engine_socket.leases import ReadLease
from prfaas.types import NotNow

if TYPE_CHECKING:
    from vllm.v1.request import Request

_LOG = logging.getLogger(__name__)
MOMENT_S = 0.01  # a kvd answers within a millisecond
MAX_LOOKUPS = 256  # that wait for the kvd. Further requests do not ask


class PrefixLookup:
    """Of one request."""

    def __init__(self, access: FormAccess, found: Future[ReadLease | None], until_s: float) -> None:
        self.access = access
        self._found = found
        self._until_s = until_s
        self._waited = False

    def is_done(self, now_s: float) -> bool:
        if not self._waited and not self._found.done():
            self._waited = True
            wait([self._found], MOMENT_S)
        return self._found.done() or now_s > self._until_s

    @property
    def late(self) -> bool:
        """The kvd has not answered yet."""
        return not self._found.done()

    def take(self) -> ReadLease | None:
        """The pinned prefix, which the caller releases. None: there is none, or it came too
        late."""
        if self._found.done() and not self._found.cancelled():
            return self._found.result()
        self.drop()
        return None

    def drop(self) -> None:
        """The prefix is not needed."""
        self._found.cancel()
        self._found.add_done_callback(_release)


class PrefixLookups:
    def __init__(self, timeout_s: float, clock: Clock | None = None) -> None:
        self._timeout_s = timeout_s
        self.clock = clock or MonotonicClock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="prfaas-lookups")
        self._waiting: set[Future[ReadLease | None]] = set()

    def start(self, request: Request, access: FormAccess) -> PrefixLookup | None:
        """None when there is nothing to ask: the request must not use cached state, or has no whole
        block before its last token, which vLLM computes. None, too, when too many lookups wait."""
        self._waiting = {found for found in self._waiting if not found.done()}
        if request.skip_reading_prefix_cache or len(self._waiting) >= MAX_LOOKUPS:
            return None
        tokens = (request.prompt_token_ids or [])[:-1]
        if len(tokens) < access.layout.block_tokens:
            return None
        found = self._thread.submit(_find, access, tokens, *salt_and_adapter(request))
        self._waiting.add(found)
        return PrefixLookup(access, found, self.clock.now() + self._timeout_s)

    def close(self) -> None:
        """After the kvd's clients: pending calls have failed by then."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def salt_and_adapter(request: Request) -> tuple[str, str]:
    """What names the state of a request beside its tokens."""
    adapter = request.lora_request.lora_name if request.lora_request else ""
    return request.cache_salt or "", adapter


def _find(access: FormAccess, tokens: list[int], salt: str, adapter: str) -> ReadLease | None:
    try:
        layout = access.layout
        hashes = block_hashes(tokens, layout.block_tokens, salt=salt, adapter=adapter)
        lease = access.kvd.pin(hashes)
        if isinstance(lease, NotNow):
            return None
        if lease.tokens and layout.can_resume_at(lease.tokens):
            return lease
        lease.release()
    except Exception as error:
        _LOG.warning("the kvd was not asked for a prefix: %r", error)
    return None


def _release(found: Future[ReadLease | None]) -> None:
    if not found.cancelled() and (lease := found.result()) is not None:
        try:
            lease.release()
        except Exception as error:  # the kvd ends the lease with this process
            _LOG.warning("a prefix was not released: %r", error)
