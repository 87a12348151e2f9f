"""Part `start` of `bench/gpu.py`: how soon a node is ready, and how soon it answers then."""

from __future__ import annotations

import statistics
import time
from typing import Any

from _gpu_nodes import NodeProcess, NodeRack, post
from _gpu_options import GpuOptions

FIRST_TARGET_S, SECOND_TARGET_S, RATIO_TARGET = 40.0, 25.0, 1.5
REQUESTS = 10
# No warm-up names these lengths. The second one is longer than a chunk on a GPU.
LENGTHS, SMALL_LENGTHS = (5_003, 11_117), (203, 317)
ANSWER_TOKENS = 4


def measure(options: GpuOptions, rack: NodeRack | None = None) -> dict[str, Any]:
    """The first node starts with an empty kernel cache, the second one with the kernels of the
    first. Before both the checkpoint is dropped from the page cache. As soon as a node is ready it
    gets ten requests of a length of its own, one after the other, all with new prompts."""
    own = rack is None
    rack = rack or NodeRack(options)
    results: dict[str, Any] = {}
    try:
        results["checkpoint"] = rack.checkpoint()
        options.keep("checkpoint", results["checkpoint"])
        lengths = SMALL_LENGTHS if options.small else LENGTHS
        targets = (FIRST_TARGET_S, SECOND_TARGET_S)
        for number, (tokens, target_s) in enumerate(zip(lengths, targets, strict=True)):
            node = rack.nodes(number + 1, options.end_s)[number]
            started = {
                **rack.starts[number],
                "target_s": target_s,
                "met": rack.starts[number]["ready_s"] <= target_s,
            }
            name = "first" if number == 0 else "second"
            options.keep(name, started)
            started["requests"] = first_requests(node, rack, tokens)
            results[name] = started
            options.keep(name, started)
    finally:
        if own:
            rack.close()
    return results


def first_requests(node: NodeProcess, rack: NodeRack, tokens: int) -> dict[str, Any]:
    seconds = []
    for number in range(REQUESTS):
        body = {
            "model": "bench",
            "prompt": rack.prompt(tokens, seed=1_000_000 + 1_000 * tokens + number),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
        }
        before_s = time.perf_counter()
        post(f"{node.url}/v1/completions", body)
        seconds.append(time.perf_counter() - before_s)
    first_to_tenth = seconds[0] / seconds[-1]
    return {
        "prompt_tokens": tokens,
        "answer_tokens": ANSWER_TOKENS,
        "seconds": [round(value, 4) for value in seconds],
        "median_of_the_rest_s": round(statistics.median(seconds[1:]), 4),
        "first_to_tenth": round(first_to_tenth, 3),
        "first_to_median": round(seconds[0] / statistics.median(seconds[1:]), 3),
        "target": RATIO_TARGET,
        "met": first_to_tenth <= RATIO_TARGET,
    }
