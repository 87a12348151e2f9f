from __future__ import annotations

import subprocess
import sys

# Every round has a Struct that was never read before, and threads that read it at the same time.
_STRESS = """
import sys, threading, msgspec
from typing import Annotated
from prfaas.schema import prepare
sys.setswitchinterval(1e-6)
limited = Annotated[int, msgspec.Meta(ge=0)] | None
fields = [(f"field_{k}", limited, None) for k in range(12)]
for round in range(1000):
    kind = msgspec.defstruct(f"Kind{round}", fields)
    prepare(kind)
    together = threading.Barrier(3)
    def read():
        together.wait()
        msgspec.convert({"field_11": 1}, kind)
    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""

# What is read in threads, per module.
_LISTED = """
import msgspec, prfaas.schema
found = set()
prfaas.schema.prepare = lambda *kinds: found.update(kind.__name__ for kind in kinds)
import prfaas.transport.messages, prfaas.gateway.api.request_schema
print(*sorted(found))
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )


def test_prepared_types_are_read_in_threads_without_a_crash() -> None:
    done = run(_STRESS)
    assert done.returncode == 0, done.stderr[-2000:]


def test_what_is_read_in_threads_is_prepared() -> None:
    done = run(_LISTED)
    assert done.stdout.split() == [
        "Chat",
        "ChatOptions",
        "CompletionOptions",
        "Ended",
        "Hello",
        "Manifest",
        "Reason",
    ], done.stderr
