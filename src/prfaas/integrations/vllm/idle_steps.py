"""The pace of an engine's steps that compute nothing.

While requests only wait for loads, or ended ones for the writes of their answers, vLLM makes one
empty step after the other, and its processes spin between them. More of them than cores can keep
the kvd from every core, although it is ready to run. Its answer to the load does not come, so they
spin until they give it up. The workers therefore let such steps last: they wait for something to
report, the longer the longer nothing was.
"""

from __future__ import annotations

# Of the time that the engine has had nothing to do. What is reported ends the wait, but a request
# that arrives, and what only the scheduler waits for, is that much later.
_SHARE = 1 / 4
# What a request that arrives may wait for such a step. The step itself takes a millisecond, so that
# the engine's processes are now at rest for most of the time.
MOST_PAUSE_S = 0.02


class IdlePace:
    """Of one worker. Callers pass the time. Pure."""

    def __init__(self) -> None:
        self._idle_since_s: float | None = None

    def pause_s(self, idle: bool, now_s: float) -> float:
        """How long the worker waits for something to report at the end of a step. `idle`: the step
        has computed nothing, and there is nothing to report."""
        if not idle:
            self._idle_since_s = None
            return 0.0
        if self._idle_since_s is None:
            self._idle_since_s = now_s
        return min(MOST_PAUSE_S, (now_s - self._idle_since_s) * _SHARE)
