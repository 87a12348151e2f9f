"""One plain vLLM, without a connector: what every hand-off must equal.

python -m tests.vllm.reference MODEL MAX_TOKENS < prompts.json > tokens.json
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prfaas_lab.testing.vllm_server import Generated

START_AND_RUN_S = 480  # only a hang takes so long, also on a busy machine


def reference(model: Path, prompts: list[list[int]], max_tokens: int) -> list[Generated]:
    """In a separate process: vLLM keeps its settings in the process."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.reference", str(model), str(max_tokens)],
        input=json.dumps(prompts),
        capture_output=True,
        text=True,
        timeout=START_AND_RUN_S,
        env={**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [Generated(*one) for one in json.loads(done.stdout.splitlines()[-1])]


def _main(model: str, max_tokens: int) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        enforce_eager=True,
        dtype="float32",
        max_model_len=4096,
        kv_cache_memory_bytes=64 << 20,
        enable_prefix_caching=False,
        distributed_executor_backend="uni",
    )
    sampling = SamplingParams(
        max_tokens=max_tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=0
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in json.load(sys.stdin)]
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    generated = [_generated(output.outputs[0]) for output in outputs]
    sys.stdout.write("\n" + json.dumps(generated) + "\n")


def _generated(output: Any) -> Generated:
    tokens = list(output.token_ids)
    chosen = [at[token].logprob for token, at in zip(tokens, output.logprobs, strict=True)]
    return Generated(tokens, chosen)


if __name__ == "__main__":
    _main(sys.argv[1], int(sys.argv[2]))
