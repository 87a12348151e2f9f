"""python -m tests.kvd.fuzz [MESSAGES [SOCKET_MESSAGES [SEED [CASE]]]]

MESSAGES in process, in cases that a failure names, and SOCKET_MESSAGES to a kvd's process. The
cases begin with CASE.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from prfaas.display.console import progress_bar
from tests.kvd.fuzz.in_process import fuzz_in_process
from tests.kvd.fuzz.sockets import fuzz_sockets


def main(messages: int, socket_messages: int, seed: int, case: int) -> None:
    started_s = time.monotonic()
    if messages:
        with progress_bar("kvd messages in process", messages) as show:
            done = fuzz_in_process(messages, seed, first_case=case, show=show)
        took_s = time.monotonic() - started_s
        _say(
            f"{done.messages:,} mutated messages to {done.cases} kvds in process, and "
            f"{done.valid:,} valid ones; seed {seed}, {took_s:.0f} s",
            done.answers,
        )
    started_s = time.monotonic()
    if socket_messages:
        with progress_bar("kvd messages over sockets", socket_messages) as show:
            sent = fuzz_sockets(socket_messages, seed, show=show)
        took_s = time.monotonic() - started_s
        _say(
            f"{sent.messages:,} mutated messages to a kvd's process, and {sent.valid:,} valid "
            f"ones; {sent.connections:,} connections ({sent.cut:,} cut); seed {seed}, {took_s:.0f} s",
            sent.answers,
        )


def _say(line: str, answers: Counter[str]) -> None:
    counts = ", ".join(f"{count:,} {name}" for name, count in answers.most_common())
    sys.stdout.write(f"{line}\n  answers: {counts}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    defaults = [1_000_000, 20_000, time.time_ns() % 10**9, 0]
    main(*given, *defaults[len(given) :])
