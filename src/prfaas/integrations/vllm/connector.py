"""PrfaasConnector: forwards vLLM's hooks to the scheduler's or the worker's side. Decides nothing,
but contains what they raise: an exception in a hook would end the engine and all its requests.

vLLM makes one object in the scheduler's process and one in each worker's process. Both register
with the host's kvd, once for each form in which the engine hands over (`caches/forms.py`). The
scheduler's side owns leases, the workers join them.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from prfaas.integrations.vllm import compat
from prfaas.integrations.vllm.answers.boundaries import count_slots
from prfaas.integrations.vllm.answers.keeper import AnswerKeeper
from prfaas.integrations.vllm.caches.forms import make_copies, make_forms
from prfaas.integrations.vllm.events import EventRelay
from prfaas.integrations.vllm.form_access import connect
from prfaas.integrations.vllm.metrics import PrfaasPromMetrics, PrfaasStats
from prfaas.integrations.vllm.scheduler_side import SchedulerSide
from prfaas.integrations.vllm.settings import read_settings
from prfaas.integrations.vllm.steps import StepOrders
from prfaas.integrations.vllm.worker_forms import WorkerForms
from prfaas.integrations.vllm.worker_side import WorkerSide

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


_LOG = logging.getLogger(__name__)
_Hook = TypeVar("_Hook", bound=Callable[..., Any])


def _contained(default: Callable[[], Any]) -> Callable[[_Hook], _Hook]:
    """A hook that logs what it raises and returns `default()` instead."""

    def contain(hook: _Hook) -> _Hook:
        @functools.wraps(hook)
        def contained(*args: Any, **kwargs: Any) -> Any:
            try:
                return hook(*args, **kwargs)
            except Exception:
                _LOG.exception("%s failed", hook.__name__)
                return default()

        return cast(_Hook, contained)

    return contain


# limits: vLLM's interface dictates the methods.
class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        compat.check_version()
        settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        compat.check_config(vllm_config)
        in_worker = role is KVConnectorRole.WORKER
        rank = get_tensor_model_parallel_rank() if in_worker else 0
        self._forms = make_forms(vllm_config, kv_cache_config, settings, rank)
        transfer: Any = vllm_config.kv_transfer_config
        keeps = settings.keep_answers and compat.can_keep_answers(vllm_config)
        accesses = connect(self._forms, settings, transfer.engine_id, keeps_answers=keeps)
        max_requests = vllm_config.scheduler_config.max_num_seqs
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerForms | None = None
        self._relay: EventRelay | None = None
        if in_worker:
            news = threading.Event()
            self._worker = WorkerForms(
                {
                    access.form: WorkerSide(
                        access.kvd,
                        access.layout,
                        keeps_answers=keeps,
                        slots=count_slots(access.layout, max_requests) if keeps else 0,
                        on_result=news.set,
                    )
                    for access in accesses
                },
                news,
            )
        else:
            resumes = compat.can_resume(vllm_config)
            answers = AnswerKeeper(accesses, max_requests) if keeps else None
            self._scheduler = SchedulerSide(
                accesses,
                can_resume=resumes,
                answers=answers,
                lookup_timeout_s=settings.lookup_timeout_s,
            )
            first = accesses.first
            self._relay = EventRelay.of(vllm_config.kv_events_config, first.kvd, first.layout)

    # In the scheduler's process -------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._scheduler_side.manager = kv_cache_manager

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return self._scheduler is not None and self._scheduler.completes_divergent_hits

    def on_new_request(self, request: Request) -> None:
        try:
            self._scheduler_side.accept(request)
        except Exception as error:
            self._scheduler_side.fail(request, error)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        try:
            return self._scheduler_side.count_loadable_tokens(request, num_computed_tokens)
        except Exception as error:
            return self._scheduler_side.fail(request, error)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._kv_cache_config.transfer_group_ids  # type: ignore[no-any-return]

    @_contained(lambda: None)
    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._scheduler_side.plan_load(request, blocks, num_external_tokens)

    @_contained(StepOrders)  # what this step lacks is in the next step's orders
    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepOrders:
        return self._scheduler_side.take_orders(scheduler_output)

    @_contained(lambda: None)
    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._scheduler_side.take_results(connector_output)

    @_contained(lambda: (False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler_side.finish(request, block_ids)

    # In a worker's process ------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for form, copies in make_copies(self._forms, kv_caches).items():
            self._worker_side.set_copies(form, copies)

    def bind_connector_metadata(self, connector_metadata: StepOrders) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._begin_step(connector_metadata)

    @_contained(lambda: None)
    def _begin_step(self, orders: StepOrders) -> None:
        self._worker_side.begin_step(orders)

    @_contained(lambda: None)
    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        self._worker_side.start_loads(self._get_connector_metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Does nothing: loads end before a request's first step."""

    @_contained(lambda: None)
    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._worker_side.save_layer(layer_name)

    @_contained(lambda: None)
    def wait_for_save(self) -> None:
        self._worker_side.end_step()

    @_contained(KVConnectorTransferResults)
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        results = self._worker_side.take_results(finished_req_ids)
        return KVConnectorTransferResults(
            finished_sending=results.ended,
            finished_recving=results.loaded,
            failed_recving=results.failed,
        )

    # Both -----------------------------------------------------------------------------------------

    @_contained(lambda: None)
    def get_kv_connector_stats(self) -> PrfaasStats | None:
        counts = (self._scheduler or self._worker_side).take_counts()
        return PrfaasStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PrfaasStats:
        return PrfaasStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PrfaasPromMetrics:
        return PrfaasPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """vLLM calls `save_kv_layer` only between the pieces of a graph."""
        return True

    @_contained(lambda: None)
    def shutdown(self) -> None:
        if self._relay is not None:
            self._relay.close()
        (self._scheduler or self._worker_side).close()

    @property
    def _scheduler_side(self) -> SchedulerSide:
        assert self._scheduler is not None, "this hook belongs to the scheduler's process"
        return self._scheduler

    @property
    def _worker_side(self) -> WorkerForms:
        assert self._worker is not None, "this hook belongs to a worker's process"
        return self._worker
