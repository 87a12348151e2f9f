"""What Python and asyncio say in a process's output about coroutines, tasks and sockets that were
not ended properly. They are warnings and log lines, and change no exit code."""

from __future__ import annotations

SIGNS = (
    "was never awaited",
    "was destroyed but it is pending",
    "exception was never retrieved",
    "ResourceWarning",
)
# Python shows these warnings only when it is asked to.
ENVIRONMENT = {"PYTHONWARNINGS": "default::ResourceWarning"}


def check_output(text: str) -> None:
    lines = [line for line in text.splitlines() if any(sign in line for sign in SIGNS)]
    assert not lines, "\n".join(lines)
