"""python -m tests.kvd.fuzz [MESSAGES [SOCKET_MESSAGES [CONVERSIONS [SEED [CASE]]]]]

MESSAGES in process, on all cores, in cases that a failure names. SOCKET_MESSAGES to processes: a
third to a kvd, a third to a kvd with a worker, and a third, frames, to the data port of such a kvd.
CONVERSIONS: cases of an engine's memory and a kvd's pages, on one core. With CASE, MESSAGES go to
the cases from that one on, on one core, and conversions begin with it.
"""

from __future__ import annotations

import sys
import time
from collections import Counter

from prfaas.display.console import progress_bar
from tests.kvd.fuzz.conversions import fuzz_conversions
from tests.kvd.fuzz.cores import fuzz_on_all_cores
from tests.kvd.fuzz.data_port import fuzz_data_port
from tests.kvd.fuzz.in_process import fuzz_in_process
from tests.kvd.fuzz.sockets import fuzz_sockets


def main(
    messages: int, socket_messages: int, conversions: int, seed: int, case: int | None
) -> None:
    started_s = time.monotonic()
    if conversions:
        with progress_bar("conversions", conversions) as show:
            converted = fuzz_conversions(conversions, seed, first_case=case or 0, show=show)
        _say(
            f"{converted.cases:,} conversions with mutated numbers",
            converted.outcomes,
            seed,
            time.monotonic() - started_s,
        )
    started_s = time.monotonic()
    if messages:
        with progress_bar("kvd messages in process", messages) as show:
            if case is None:
                done = fuzz_on_all_cores(messages, seed, show)
            else:
                done = fuzz_in_process(messages, seed, first_case=case, show=show)
        _say(
            f"{done.messages:,} mutated messages to {done.cases} kvds in process, and "
            f"{done.valid:,} valid ones",
            done.answers,
            seed,
            time.monotonic() - started_s,
        )
    third = -(-socket_messages // 3)
    for workers in (0, 1) if third else ():
        started_s = time.monotonic()
        with progress_bar("kvd messages over sockets", third) as show:
            sent = fuzz_sockets(third, seed, workers=workers, show=show)
        _say(
            f"{sent.messages:,} mutated messages to a kvd's process with {workers} workers, and "
            f"{sent.valid:,} valid ones on {sent.connections:,} connections, {sent.cut:,} of them "
            "cut",
            sent.answers,
            seed,
            time.monotonic() - started_s,
        )
    if third:
        started_s = time.monotonic()
        with progress_bar("frames to a kvd's data port", third) as show:
            framed = fuzz_data_port(third, seed, show=show)
        _say(
            f"{framed.frames:,} mutated frames to the data port of a kvd with a worker, and "
            f"{framed.valid:,} valid ones on {framed.connections:,} connections; "
            f"{framed.committed:,} transfers committed in spite of them, and "
            f"{framed.hand_overs:,} hand-offs beside them",
            framed.answers,
            seed,
            time.monotonic() - started_s,
        )


def _say(line: str, answers: Counter[str], seed: int, took_s: float) -> None:
    counts = ", ".join(f"{count:,} {name}" for name, count in answers.most_common())
    sys.stdout.write(f"{line}; seed {seed}, {took_s:.0f} s\n  answers: {counts}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    given = [int(text) for text in sys.argv[1:]]
    defaults = (1_000_000, 20_000, 30_000, time.time_ns() % 10**9, None)
    main(*given, *defaults[len(given) :])
