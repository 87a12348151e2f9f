"""vLLM servers of several shapes on a CPU: ranks, stages, block sizes, cache modes; for tests and
benchmarks of hand-offs between unlike engines.

A configuration is independent of the model; what a model needs in addition is in `SERVED_MODELS`.
Pure: `vllm_server.py` starts the servers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prfaas.engine.checkpoint.architectures import Size
from prfaas.errors import InputError

MAX_TOKENS = 2_048  # of a prompt with its answer
CHUNK_TOKENS = 256  # of a chunked prefill
# vLLM's Mamba kernels on a CPU cannot cut a chunk at a block boundary: one block at a time.
_ALIGNED_CHUNK = 128
# The first step of a pipeline's second stage needs the profile run that --enforce-eager leaves out.
_PIPELINE = {"mode": 2, "backend": "eager"}


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server of a small checkpoint of this architecture needs on a CPU."""

    arch: str
    size: Size = "tiny"
    flags: tuple[str, ...] = ()
    compilation: Mapping[str, Any] = field(default_factory=dict)
    # False: vLLM forces one block size, computes a prompt in one step and keeps no prefixes, so
    # that it continues a state only when one token is left to compute.
    is_chunked: bool = True
    has_states: bool = False


SERVED_MODELS: dict[str, ServedModel] = {
    model.arch: model
    for model in (
        ServedModel("falcon-h1", has_states=True),
        ServedModel("gemma3"),
        # vLLM's CPU attention takes heads of 32 dimensions; the tiny ones have 16.
        ServedModel("qwen3", "small"),
        ServedModel("gpt-oss", "small"),
        ServedModel(
            "deepseek-v3",
            # The default backend computes in bfloat16 only.
            flags=("--attention-config", json.dumps({"backend": "CPU_MLA"})),
            # The custom op rotates the rope part of prefills by wrong positions.
            compilation={"custom_ops": ["none"]},
            is_chunked=False,
        ),
    )
}


@dataclass(frozen=True, slots=True)
class VllmConfiguration:
    name: str
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    block_tokens: int | None = None  # None: vLLM's own choice, 128 on a CPU
    prefix_cache: bool = False
    conv_channels_first: bool = False  # the layout of convolution histories

    @property
    def workers(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel

    def refusal(self, model: ServedModel) -> str | None:
        """Why vLLM does not run the model so; None when it does."""
        if not model.is_chunked and self.block_tokens is not None:
            return f"vLLM forces the block size of {model.arch} on a CPU"
        if not model.is_chunked and self.prefix_cache:
            return f"vLLM keeps no prefixes of {model.arch} on a CPU"
        if self.conv_channels_first and not model.has_states:
            return f"{model.arch} has no convolution histories"
        return None

    def flags(self, model: ServedModel) -> list[str]:
        flags = ["--max-model-len", str(MAX_TOKENS), *model.flags]
        for flag, size in (
            ("--tensor-parallel-size", self.tensor_parallel),
            ("--pipeline-parallel-size", self.pipeline_parallel),
        ):
            flags += [flag, str(size)] if size > 1 else []
        if self.block_tokens is not None:
            flags += ["--block-size", str(self.block_tokens)]
        compilation = dict(model.compilation)
        if self.pipeline_parallel > 1:
            compilation |= _PIPELINE
            flags.append("--no-enforce-eager")
        if compilation:
            flags += ["--compilation-config", json.dumps(compilation)]
        return flags + self._cache_flags(model)

    def _cache_flags(self, model: ServedModel) -> list[str]:
        flags = ["--enable-prefix-caching" if self.prefix_cache else "--no-enable-prefix-caching"]
        chunk = CHUNK_TOKENS
        if self.prefix_cache and model.has_states:
            flags += ["--mamba-cache-mode", "align"]
            chunk = self.block_tokens or _ALIGNED_CHUNK
        return [*flags, "--max-num-batched-tokens", str(chunk)] if model.is_chunked else flags

    def environment(self, cores: Sequence[int], first: int) -> dict[str, str]:
        """Binds each worker to a core. `first` is the core of a server with one worker. Two servers
        of one worker get different cores, because OpenMP threads of two servers on the same cores
        wait for each other."""
        bound = [cores[(first + worker) % len(cores)] for worker in range(self.workers)]
        found = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, bound))}
        if self.conv_channels_first:
            found["VLLM_SSM_CONV_STATE_LAYOUT"] = "DS"
        return found


VLLM_CONFIGURATIONS: dict[str, VllmConfiguration] = {
    configuration.name: configuration
    for configuration in (
        VllmConfiguration("tp1"),
        VllmConfiguration("tp2", tensor_parallel=2),
        VllmConfiguration("tp4", tensor_parallel=4),  # more ranks than the models have KV heads
        VllmConfiguration("pp2", pipeline_parallel=2),
        VllmConfiguration("b64", block_tokens=64),
        VllmConfiguration("b256", block_tokens=256),
        VllmConfiguration("tp2b64", tensor_parallel=2, block_tokens=64),
        VllmConfiguration("tp2pp2", tensor_parallel=2, pipeline_parallel=2),
        VllmConfiguration("cached", prefix_cache=True),
        VllmConfiguration("ds", conv_channels_first=True),
    )
}


def transfer_config(kvd_socket: str, **settings: object) -> dict[str, object]:
    """vLLM's --kv-transfer-config. `settings` are further ones of the connector."""
    return {
        "kv_connector": "PrfaasConnector",
        "kv_connector_module_path": "prfaas.integrations.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"kvd": kvd_socket, **settings},
    }


def configuration_named(name: str) -> VllmConfiguration:
    try:
        return VLLM_CONFIGURATIONS[name]
    except KeyError:
        known = ", ".join(VLLM_CONFIGURATIONS)
        raise InputError(
            f"unknown configuration {name!r}", where="pairs", fix=f"use one of: node, {known}"
        ) from None
