"""An engine process for tests to kill: it begins a lease, writes a part, prints a line, and waits.

python -m tests.kvd.engine_process SOCKET TOKENS STOP [GRANT]
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


def main(socket: str, tokens: int, stop: int, grant: Grant | None) -> None:
    prompt = prompt_of(tokens)
    client = KvdClient(
        Path(socket), engine_id="doomed", spec=SPEC, block_tokens=BLOCK, compat=COMPAT
    )
    lease = begun(client.begin(names(prompt), tokens, grant=grant))
    fill(lease, prompt, stop=stop)
    client.flush()
    sys.stdout.write("written\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    given = [msgspec.json.decode(text, type=Grant) for text in sys.argv[4:]]
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), given[0] if given else None)
