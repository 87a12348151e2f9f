"""The rate at which KV crosses a TCP link between two processes on loopback.

    python -m prfaas_lab bench transport [--rounds 5] [--peers SCRIPT] [--connections 1,2,4,8]
                                         [--only tls,small] [--workers 8] [--mib 1024]

Each run moves about 256 MiB (`--mib`) between two regions that no CPU cache holds. The segments are
those of a hand-off: one layer of one 2,048-token chunk, of the paper's 1T hybrid model and of a
dense model; and 40,000 segments of 32 KiB. Rounds interleave our runs with the peers' runs, and the
results are medians. The peer of mutual TLS is a pair of bare `ssl` sockets. `--peers` runs an
external script that prints {name: {"GBps": x}} and accepts `--only NAME`; it adds `peers` and
`ratios` to the result.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from _transport_ends import Case, bench
from _transport_report import Samples, machine, report
from _transport_ssl_pair import ssl_pair
from prfaas.catalog import Catalog
from prfaas.kvspec import handoff_segments, segment_bytes
from prfaas.transport.workers.pool import default_workers
from prfaas_lab.testing.certificates import make_certificates

PARTS = ("bare", "checked", "tls", "small")
CHUNK_TOKENS = 2_048
SMALL_SEGMENTS, SMALL_BYTES = 40_000, 32 << 10


def chunk_segments(model: str, nbytes: int) -> tuple[int, ...]:
    """The sizes of a transfer's segments, each one layer of one chunk."""
    spec = Catalog.builtin().model(model).spec()
    chunks = handoff_segments(spec, 2 * CHUNK_TOKENS, chunk_tokens=CHUNK_TOKENS)
    first = [segment for segment in chunks if segment.stop == CHUNK_TOKENS]
    sizes: list[int] = []
    while sum(sizes) < nbytes:
        sizes += [segment_bytes(spec, segment) for segment in first]
    while sum(sizes) > nbytes:
        sizes.pop()
    return tuple(sizes)


def cases(connections: list[int], parts: set[str], nbytes: int) -> list[Case]:
    hybrid, dense = (chunk_segments(name, nbytes) for name in ("case-study-1t", "minimax-m2.5"))
    small = (SMALL_BYTES,) * SMALL_SEGMENTS
    found = []
    for count in connections:
        found += [
            Case("bare", "1T hybrid", hybrid, count, checksums=False, tls=False),
            Case("checked", "1T hybrid", hybrid, count, checksums=True, tls=False),
            Case("checked", "dense", dense, count, checksums=True, tls=False),
            # TLS has its own checksums.
            Case("tls", "1T hybrid", hybrid, count, checksums=False, tls=True),
            Case("small", "small", small, count, checksums=True, tls=False),
        ]
    return [case for case in found if case.part in parts]


def peers_once(script: Path, mib: int) -> dict[str, float | None]:
    ran = subprocess.run(
        [sys.executable, str(script), "--mib", str(mib), "--reps", "3"],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    return {name: result["GBps"] for name, result in json.loads(ran.stdout).items()}


def parse_parts(text: str) -> set[str]:
    parts = set(text.split(","))
    if not parts <= set(PARTS):
        raise argparse.ArgumentTypeError(f"give some of {','.join(PARTS)}")
    return parts


def parse_connections(text: str) -> list[int]:
    if not all(part.isdecimal() and int(part) >= 1 for part in text.split(",")):
        raise argparse.ArgumentTypeError("give numbers from 1 on, with commas between them")
    return [int(part) for part in text.split(",")]


def parse_mib(text: str) -> int:
    if not text.isdecimal() or not 16 <= int(text) <= 16 << 10:
        raise argparse.ArgumentTypeError("give a number from 16 to 16384")
    return int(text)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="Runs per case (default 5).")
    parser.add_argument(
        "--connections",
        type=parse_connections,
        default="1,2,4,8",
        help="Numbers of TCP connections.",
    )
    parser.add_argument(
        "--only",
        type=parse_parts,
        default=",".join(PARTS),
        help=f"The parts to run (default {','.join(PARTS)}).",
    )
    parser.add_argument(
        "--workers",
        type=int,
        default=default_workers(),
        help=f"Worker processes of each end (default here {default_workers()}).",
    )
    parser.add_argument(
        "--mib",
        type=parse_mib,
        default=256,
        help="MiB per run (default 256). More suits many connections: 256 MiB take 20 ms then.",
    )
    parser.add_argument(
        "--peers", type=Path, help="Script of another project to run for comparison."
    )
    parser.add_argument("--json", action="store_true", help="No effect: JSON is printed anyway.")
    return parser.parse_args(arguments)


def main() -> None:
    arguments = parse_arguments(sys.argv[1:])
    all_cases = cases(arguments.connections, arguments.only, arguments.mib << 20)
    found = Samples()
    with ExitStack() as stack:
        certificates = make_certificates(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        largest = max(case.nbytes for case in all_cases)
        runner = stack.enter_context(bench(certificates, largest, arguments.workers))
        pair = None
        if "tls" in arguments.only:
            pair = stack.enter_context(ssl_pair(certificates, arguments.mib << 20))
        for number in range(arguments.rounds):
            for case in all_cases:
                found.add_run(case, runner.run(case))
                if case.tls and pair is not None:
                    # Right after our run: on a shared machine, minutes apart are not comparable.
                    found.add_ssl_pair(pair.run())
            if arguments.peers is not None:
                found.add_peers(peers_once(arguments.peers, arguments.mib))
            sys.stderr.write(f"round {number + 1} of {arguments.rounds}\n")
    result = {
        "machine": machine(),
        "workers": arguments.workers,
        "transfer_bytes": arguments.mib << 20,
        **report(found),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
