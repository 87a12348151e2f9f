"""`prfaas node` with an emulated engine that is held: a sequence gets its next token when the test
allows it. So a test knows which tokens exist, and that a client which has a token got it before the
next one was computed.

    python -m tests.envoy.held_node FOLDER node --engine emulated ...

FOLDER gets a Unix socket, over which the test allows tokens (a line `NUMBER COUNT`), and a journal
of the engine's jobs (lines `prefill NUMBER`, `decode NUMBER`, `ended NUMBER REASON`). The first
tokens of a prompt have the number of its request.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from prfaas.cli.main import main
from prfaas.engine.api import Emit, EngineJob, Event, Finished, JobFailed
from prfaas.engine.emulated import EmulatedEngine
from prfaas.engine.emulated.sequence import EmulatedSequence
from prfaas.launch import engine_choice
from prfaas.types import NotNow
from tests.envoy.numbered_prompts import number_of

SOCKET, JOURNAL = "allow.sock", "journal"
LOOK_S = 1.0  # a notification ends the wait; this is for one that the queue may have used itself


class HeldEngine(EmulatedEngine):
    """A sequence stays in the batch, and waits until it may have its next token."""

    def __init__(self, folder: Path, *arguments: Any, **options: Any) -> None:
        self._allowed: Counter[int] = Counter()
        self._journal = (folder / JOURNAL).open("a", buffering=1)
        super().__init__(*arguments, **options)
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(folder / SOCKET))
        server.listen()
        threading.Thread(target=self._listen, args=(server,), daemon=True).start()

    def submit(self, job: EngineJob, emit: Emit) -> NotNow | None:
        number = number_of(job.prompt)

        def journal_and_emit(event: Event) -> None:
            match event:
                case Finished(reason=reason):
                    self._journal.write(f"ended {number} {reason}\n")
                case JobFailed():
                    self._journal.write(f"ended {number} failed\n")
            emit(event)

        refused = super().submit(job, journal_and_emit)
        if refused is None:
            kind = "decode" if job.sampling.max_tokens > 1 else "prefill"
            self._journal.write(f"{kind} {number}\n")
        return refused

    def _step(self) -> None:
        """One token of each sequence that may have one. Takes no time, unlike that of the base."""
        with self._queue.changed:
            due = [one for one in self._running if self._allowed[number_of(one.job.prompt)]]
            if not due:
                if not (self._queue.has_cancelled or self._queue.closing):
                    self._queue.changed.wait(LOOK_S)
                return  # jobs that have arrived or were cancelled come first
            self._allowed.subtract(number_of(one.job.prompt) for one in due)
        ended: dict[EmulatedSequence, Finished] = {}
        for sequence in due:
            if sequence.tokens < len(sequence.job.prompt):
                sequence.prefilled(self._limits.vocab_size)
            else:
                sequence.tokens += 1
            if (finished := sequence.next_token()) is not None:
                ended[sequence] = finished
        with self._queue.changed:
            self._running = [one for one in self._running if one not in ended]
        for sequence, finished in ended.items():
            sequence.finish(finished)

    def _listen(self, server: socket.socket) -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=self._read, args=(connection,), daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        with connection, connection.makefile() as lines:
            for line in lines:
                number, count = map(int, line.split())
                with self._queue.changed:
                    self._allowed[number] += count
                    self._queue.changed.notify_all()


if __name__ == "__main__":
    held = Path(sys.argv.pop(1))
    vars(engine_choice)["EmulatedEngine"] = partial(HeldEngine, held)
    main()
