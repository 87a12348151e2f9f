"""The W3C trace context: which trace a call belongs to, and which span has made it. Pure.

traceparent: 00-<trace id, 32 hex digits>-<span id, 16 hex digits>-<flags, 2 hex digits>
tracestate: what tracing systems tell each other about the trace; it is passed on as it came
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Sequence
from typing import Final, NamedTuple

TRACEPARENT: Final = "traceparent"  # the name of the header
TRACESTATE: Final = "tracestate"
_SAMPLED = 0x01
# A later version may append fields, each after a dash; version ff is invalid.
_PATTERN = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
# Ids are no secrets: a generator of this process makes them without a system call.
_random_bits = random.Random(os.urandom(32)).getrandbits
_LONGEST = 512  # characters of a header that is read: as much as the standard demands
_PRINTABLE = re.compile(r"[ -~]*\Z")


class TraceContext(NamedTuple):
    """A span that makes calls. The spans of the calls have it as their parent."""

    trace_id: str
    span_id: str
    sampled: bool  # its spans go to the collector, where there is one
    state: str = ""  # tracestate of the client

    @property
    def traceparent(self) -> str:
        return self.traceparent_of(self.span_id)

    def traceparent_of(self, span_id: str) -> str:
        """The header of a call whose span is a span of the same trace."""
        return f"00-{self.trace_id}-{span_id}-{'01' if self.sampled else '00'}"

    def child(self) -> TraceContext:
        """A new span of the same trace."""
        return self._replace(span_id=new_span_id())

    def headers_of(self, traceparent: str) -> dict[str, str]:
        """Those of a call with this `traceparent`."""
        if not self.state:
            return {TRACEPARENT: traceparent}
        return {TRACEPARENT: traceparent, TRACESTATE: self.state}


def new_trace(*, sampled: bool) -> TraceContext:
    return TraceContext(f"{_random_bits(128):032x}", new_span_id(), sampled)


def new_span_id() -> str:
    return f"{_random_bits(64):016x}"


def parse_traceparent(header: str | None) -> TraceContext | None:
    """None where there is no header, or one that is invalid: then a new trace begins, as the
    standard demands."""
    if header is None or len(header) > _LONGEST:
        return None
    found = _PATTERN.match(header.strip())
    if found is None or found[1] == _NO_TRACE or found[2] == _NO_SPAN:
        return None
    if header.startswith("00") and found[4] is not None:
        return None
    return TraceContext(found[1], found[2], bool(int(found[3], 16) & _SAMPLED))


def join_tracestate(headers: Sequence[str]) -> str:
    """The value of all `tracestate` headers of a request; empty where it cannot be passed on."""
    joined = ",".join(headers).strip()
    return joined if len(joined) <= _LONGEST and _PRINTABLE.match(joined) else ""
