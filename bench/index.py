"""The time in which the global index hashes long prompts and matches them against a million blocks.

\b
    python -m prfaas_lab bench index [--blocks 1000000] [--peers SCRIPT [--peer-python PYTHON]]

The index has two clusters of eight nodes, 64-token blocks, one full-attention group and one linear
group. Prints JSON: `match_ms` (medians of hashing plus matching, from a list and from an array),
`events_blocks_per_s`, `bytes_per_block`, and with `--peers` the output of an external script in the
same run.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
import numpy as np

from prfaas.cache.groups import GroupRule
from prfaas.cache.hashing import PromptHashes, Tokens, block_hashes
from prfaas.cache.index import NodeInfo
from prfaas.cache.manager import GlobalKVManager
from prfaas.kvspec import MLA, Linear, build_spec
from prfaas.types import ClusterId, HashEvent, NodeId

BLOCK_TOKENS = 64
STORED_TOKENS = 32_768
LENGTHS = (8_192, 32_768, 131_072)
VOCABULARY = 150_000
RULES = (GroupRule("full0", "full"), GroupRule("linear0", "linear"))


def build(blocks: int) -> tuple[GlobalKVManager, list[list[int]], dict[str, float]]:
    """Returns a manager with at least `blocks`, some of its prompts, and the cost to build it."""
    spec = build_spec((MLA((0,), 512, 64), Linear((1,), 32, 32, 128, 128, 4)))
    manager = GlobalKVManager(spec)
    nodes = [NodeId(f"c{cluster}n{node}") for cluster in range(2) for node in range(8)]
    for node in nodes:
        manager.join(NodeInfo(node, ClusterId(node[:2]), BLOCK_TOKENS, RULES))

    rng = np.random.default_rng(0)
    payloads: list[bytes] = []
    prompts: list[list[int]] = []
    seqs = dict.fromkeys(nodes, 0)
    stored = 0
    while stored < blocks:
        tokens = rng.integers(0, VOCABULARY, STORED_TOKENS, dtype=np.uint32)
        node = nodes[len(payloads) // 2 % len(nodes)]
        hashes = tuple(block_hashes(tokens, BLOCK_TOKENS))
        for group, names in (("full0", hashes), ("linear0", hashes[-1:])):
            event = HashEvent(seqs[node], node, group, BLOCK_TOKENS, names, "stored")
            payloads.append(msgspec.msgpack.encode(event))
            seqs[node] += 1
        stored += len(hashes)
        if len(prompts) < 20:
            prompts.append(tokens.tolist())

    before = _resident_bytes()
    start = time.perf_counter()
    for payload in payloads:
        manager.apply(msgspec.msgpack.decode(payload, type=HashEvent))
    seconds = time.perf_counter() - start
    return (
        manager,
        prompts,
        {
            "blocks": stored,
            "events_blocks_per_s": round(stored / seconds),
            "bytes_per_block": round((_resident_bytes() - before) / stored, 1),
        },
    )


def measure(
    manager: GlobalKVManager, prompts: list[list[int]], repeats: int
) -> dict[str, dict[str, float]]:
    """Prompt length -> type of the token sequence -> median milliseconds."""
    forms: dict[str, Callable[[list[int]], Tokens]] = {
        "list": list,
        "array": lambda tokens: array("I", tokens),
        "numpy": lambda tokens: np.array(tokens, dtype=np.uint32),
    }
    rng = np.random.default_rng(1)
    result: dict[str, dict[str, float]] = {}
    for length in LENGTHS:
        result[str(length)] = {}
        for form, convert in forms.items():
            times: list[float] = []
            for repeat in range(repeats):
                stored = prompts[repeat % len(prompts)]
                tail = rng.integers(0, VOCABULARY, max(0, length - len(stored)))
                tokens = convert((stored + tail.tolist())[:length])
                start = time.perf_counter()
                prompt = PromptHashes(tokens)
                match = manager.match(prompt)
                times.append(time.perf_counter() - start)
                found = max(m.attention_tokens for m in match.nodes.values())
                assert found == min(length, STORED_TOKENS), "a stored prompt was not found"
                del prompt, match  # not timed: a gateway keeps both until the request ends
            result[str(length)][form] = round(statistics.median(times) * 1e3, 3)
    return result


def run_peers(script: Path, python: str) -> list[object]:
    """Runs an external script and returns the JSON lines that it prints."""
    done = subprocess.run([python, str(script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{script} failed: {done.stderr.strip()[-500:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@click.command(help=__doc__)
@click.option("--blocks", default=1_000_000, show_default=True, help="Blocks in the index.")
@click.option("--repeats", default=60, show_default=True, help="Measurements of each case.")
@click.option(
    "--peers",
    type=click.Path(exists=True, path_type=Path),
    help="Script of another project to run for comparison.",
)
@click.option("--peer-python", default=sys.executable, help="Python interpreter of that script.")
@click.option("--json", "as_json", is_flag=True, help="No effect: JSON is printed anyway.")
def main(blocks: int, repeats: int, peers: Path | None, peer_python: str, as_json: bool) -> None:
    manager, prompts, numbers = build(blocks)
    result: dict[str, object] = {
        **numbers,
        "match_ms": measure(manager, prompts, repeats),
        "cpus": os.cpu_count(),
    }
    if peers is not None:
        result["peers"] = {peers.stem: run_peers(peers, peer_python)}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
