"""An engine process for tests to kill: it begins a lease, writes a part, prints a line, and waits.

python -m tests.kvd.engine_process SOCKET TOKENS STOP [GRANT | answer_from=TOKENS]
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import msgspec

from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.types import Grant
from tests.cache.builders import BLOCK
from tests.kvd.hosts import COMPAT, SPEC, begun, fill, names, prompt_of

ANSWER = "answer_from="


def main(socket: str, tokens: int, stop: int, grant: Grant | None, answer_from: int | None) -> None:
    prompt = prompt_of(tokens)
    client = KvdClient(
        Path(socket), engine_id="doomed", spec=SPEC, block_tokens=BLOCK, compat=COMPAT
    )
    if answer_from is None:
        lease = begun(client.begin(names(prompt), tokens, grant=grant))
    else:
        lease = begun(client.begin_answer(names(prompt), tokens, first_token=answer_from))
    fill(lease, prompt, stop=stop)
    client.flush()
    sys.stdout.write("written\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    more = sys.argv[4] if len(sys.argv) > 4 else ""
    given = msgspec.json.decode(more, type=Grant) if more.startswith("{") else None
    answer = int(more.removeprefix(ANSWER)) if more.startswith(ANSWER) else None
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), given, answer)
