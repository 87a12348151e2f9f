"""vLLM's real scheduler and our connector, with a model runner that only fills blocks.

Each computed token leaves its mark in the blocks of its group, as an attention or a linear layer
would, so that what arrives elsewhere can be told apart. No weights, no forward pass.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from prfaas.integrations.vllm import compat
from prfaas.integrations.vllm.answers.boundaries import count_slots
from prfaas.integrations.vllm.caches.layer_copies import native_copies
from prfaas.integrations.vllm.caches.native_layout import native_layout
from prfaas.integrations.vllm.steps import StepOrders
from prfaas.integrations.vllm.worker_forms import WorkerForms
from prfaas.integrations.vllm.worker_side import WorkerSide
from prfaas.kvd.engine_socket.client import KvdClient
from tests.vllm.models import BLOCK_TOKENS
from tests.waiting import wait_until

STEP_TOKENS = 256
FAILED = {"failed": True}  # instead of parameters, for a request that ended with an error


class EngineFree:
    def __init__(
        self,
        model: Path,
        caches: KVCacheConfig,
        kvd: Path,
        *,
        prefix_caching: bool = False,
        keep_answers: bool = True,
    ) -> None:
        config = EngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=4096,
            max_num_batched_tokens=STEP_TOKENS,
            kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=prefix_caching,
            kv_transfer_config=KVTransferConfig(
                kv_connector="PrfaasConnector",
                kv_connector_module_path="prfaas.integrations.vllm",
                kv_role="kv_both",
                kv_connector_extra_config={
                    **{"kvd": str(kvd), "form": "native"},
                    "keep_answers": keep_answers,
                },
            ),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = caches.num_blocks
        self.layout = native_layout(caches, 1)
        block_size, hash_block_size = resolve_kv_cache_block_sizes(caches, config)
        self.scheduler = Scheduler(
            config,
            caches,
            StructuredOutputManager(config),
            block_size=block_size,
            hash_block_size=hash_block_size,
            log_stats=True,
        )
        client = KvdClient(
            kvd,
            engine_id=config.kv_transfer_config.engine_id,
            spec=self.layout.spec,
            block_tokens=BLOCK_TOKENS,
            compat=compat.native_compat(config, caches, BLOCK_TOKENS),
            whole_blocks=True,
            keeps_answers=keep_answers,
        )
        slots = count_slots(self.layout, config.scheduler_config.max_num_seqs)
        news = threading.Event()
        self.worker = WorkerSide(
            client, self.layout, keeps_answers=keep_answers, slots=slots, on_result=news.set
        )
        self._forms = WorkerForms({"native": self.worker}, news)
        self.blocks = dict(self._caches(caches))
        self.worker.set_copies(native_copies(self.layout, self.blocks, caches.num_blocks))
        self.answers: dict[str, Any] = {}
        self.counts: Counter[str] = Counter()  # of the connector in the scheduler
        self.resumed: dict[str, dict[str, list[bytes]]] = {}  # before a request's first step
        self.left: dict[str, dict[str, list[bytes]]] = {}  # after its last
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block_size, sha256) if prefix_caching else None

    def close(self) -> None:
        self.worker.close()
        self.scheduler.shutdown()

    # Requests -------------------------------------------------------------------------------------

    def add(
        self,
        name: str,
        prompt: list[int],
        params: dict[str, Any] | None = None,
        *,
        max_tokens: int = 1,
    ) -> Request:
        request = Request(
            name,
            list(prompt),
            SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params}
            ),
            None,
            block_hasher=self._hasher,
        )
        request.sampling_params.update_from_generation_config({}, None)
        self.scheduler.add_request(request)
        return request

    def run(self, name: str) -> Any:
        """Steps until the request has ended; its `kv_transfer_params`."""
        wait_until(lambda: self.step() is not None and name in self.answers)
        return self.answers[name]

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def step(self) -> StepOrders:
        output = self.scheduler.schedule()
        steps = output.kv_connector_metadata
        assert isinstance(steps, StepOrders)
        self._forms.begin_step(steps)
        self._forward(output)
        self._forms.start_loads(steps)
        self._forms.end_step()
        results = self._forms.take_results(output.finished_req_ids)
        done = self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=list(output.num_scheduled_tokens),
                req_id_to_index={r: i for i, r in enumerate(output.num_scheduled_tokens)},
                sampled_token_ids=[
                    self._sampled(r, n) for r, n in output.num_scheduled_tokens.items()
                ],
                kv_connector_output=KVConnectorOutput(
                    finished_sending=results.ended,
                    finished_recving=results.loaded,
                    failed_recving=results.failed,
                ),
            ),
        )
        for outputs in done.values():
            if outputs.scheduler_stats is not None:
                self.counts.update(outputs.scheduler_stats.kv_connector_stats or {})
            for one in outputs.outputs:
                if one.finish_reason is not None:
                    self.answers[one.request_id] = (
                        one.kv_transfer_params if str(one.finish_reason) != "error" else FAILED
                    )
        return steps

    # The state that a model would compute ---------------------------------------------------------

    def _content(self, name: str, tokens: int) -> dict[str, list[bytes]]:
        """What the request's blocks hold that a continuation after `tokens` tokens reads."""
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        found: dict[str, list[bytes]] = {}
        for at, group in enumerate(self.layout.groups):
            if group.kind == "state":
                ids = self.layout.state_move(at, tokens, tables).block_ids
            else:
                first = group.first_token(tokens) // BLOCK_TOKENS
                ids = tuple(tables[group.index][first : -(-tokens // BLOCK_TOKENS)])
            for layer, _ in group.layers:
                found[layer] = [self.blocks[layer][i].numpy().tobytes() for i in ids]
        return found

    def _forward(self, output: SchedulerOutput) -> None:
        computed = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for name, count in output.num_scheduled_tokens.items():
            tokens = self.scheduler.requests[name]._all_token_ids
            tables = self.scheduler.kv_cache_manager.get_block_ids(name)
            start, stop = computed[name], computed[name] + count
            if start and name not in self.left:
                self.resumed[name] = self._content(name, start)
            for at, group in enumerate(self.layout.groups):
                for layer, _ in group.layers:
                    self._mark(layer, at, tables, tokens, start, stop)
            self.left[name] = self._content(name, stop)

    def _mark(
        self,
        layer: str,
        at: int,
        tables: Sequence[Sequence[int]],
        tokens: list[int],
        start: int,
        stop: int,
    ) -> None:
        blocks, group = self.blocks[layer], self.layout.groups[at]
        if group.kind == "state":
            move = self.layout.state_move(at, stop, tables)
            blocks[move.block_ids[0]].fill_(functools.reduce(_mix, tokens[:stop], 0) % 251)
            return
        table = tables[group.index]
        for position in range(start, stop):
            block, within = divmod(position, BLOCK_TOKENS)
            if table[block]:
                blocks[table[block]].view(-1, BLOCK_TOKENS)[:, within] = tokens[position]

    def _sampled(self, name: str, count: int) -> list[int]:
        request = self.scheduler.requests[name]
        return [7] if request.num_computed_tokens >= request.num_tokens else []

    def _caches(self, caches: KVCacheConfig) -> Iterator[tuple[str, torch.Tensor]]:
        for group in caches.kv_cache_groups:
            for layer in group.layer_names:
                nbytes = group.kv_cache_spec.real_page_size_bytes
                yield layer, torch.zeros(caches.num_blocks, nbytes, dtype=torch.uint8)


def _mix(state: int, token: int) -> int:
    return (state * 31 + token + 1) % 65521
