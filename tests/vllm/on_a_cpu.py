"""Commands that start vLLM servers as operators do, changed for small models on a CPU."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Sequence

from prfaas.launch.commands import VLLM_KV_BYTES, VLLM_MAX_TOKENS, VLLM_STEP_TOKENS

CORES = itertools.cycle(sorted(os.sched_getaffinity(0)))  # servers on one core would wait
SETTINGS = {
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
_FLAGS = [
    *("--enforce-eager", "--dtype", "float32", "--max-model-len", str(VLLM_MAX_TOKENS)),
    *("--mamba-cache-mode", "align", "--max-num-batched-tokens", str(VLLM_STEP_TOKENS)),
    *("--kv-cache-memory-bytes", str(VLLM_KV_BYTES)),
]


def on_a_cpu(words: Sequence[str]) -> list[str]:
    """The words after `env`, which sets the core of the server. The package for CPUs has the
    server, but its command `vllm` looks for another package's name."""
    program, command, model, *options = words
    assert (program, command) == ("vllm", "serve"), words
    server = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    core = f"VLLM_CPU_OMP_THREADS_BIND={next(CORES)}"
    return ["env", core, *server, *options, *_FLAGS]
