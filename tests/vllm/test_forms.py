"""The forms of one engine: which it has, and which one a request uses."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import KVCacheConfig

from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.errors import InputError
from prfaas.integrations.vllm.caches.forms import make_forms
from prfaas.integrations.vllm.caches.groups import Move
from prfaas.integrations.vllm.settings import read_settings
from prfaas.integrations.vllm.steps import LoadOrder, SaveOrder, StepOrders
from prfaas.integrations.vllm.worker_forms import WorkerForms
from prfaas.integrations.vllm.worker_side import WorkerResults
from prfaas.types import Form
from tests.vllm.models import config, full

BLOCK = 128


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    model = tmp_path_factory.mktemp("model") / "qwen3"
    make_checkpoint(model, "qwen3", "small")

    def made(**more: Any) -> Any:
        built = EngineArgs(
            model=str(model),
            dtype="float32",
            enforce_eager=True,
            max_model_len=1024,
            kv_cache_memory_bytes=16 << 20,
            kv_transfer_config=KVTransferConfig(
                kv_connector="PrfaasConnector",
                kv_connector_module_path="prfaas.integrations.vllm",
                kv_role="kv_both",
                kv_connector_extra_config={"kvd": "unused"},
            ),
        ).create_engine_config()
        for name, value in more.items():
            setattr(built.parallel_config, name, value)
        return built

    return made


def caches(layers: int, **changes: Any) -> KVCacheConfig:
    return config((full(**changes), [f"model.layers.{i}.self_attn.attn" for i in range(layers)]))


def forms(engine: Any, found: KVCacheConfig, **settings: Any) -> list[Form]:
    made = make_forms(engine, found, read_settings({"kvd": "unused", **settings}), 0)
    return [form.compat.form for form in made]


def layers_of(engine: Any) -> int:
    return int(engine.model_config.hf_text_config.num_hidden_layers)


def test_an_engine_has_both_forms_and_the_canonical_one_counts_for_routing(
    engine: Callable[..., Any],
) -> None:
    built = engine()
    found = caches(layers_of(built))
    assert forms(built, found) == ["canonical", "native"]
    assert forms(built, found, form="native") == ["native"]
    assert forms(built, found, form="canonical") == ["canonical"]


def test_a_pipeline_has_the_canonical_form_alone(
    engine: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    built = engine(pipeline_parallel_size=2)
    with caplog.at_level(logging.WARNING, "prfaas"):
        assert forms(built, caches(layers_of(built))) == ["canonical"]
    with pytest.raises(InputError, match="pipeline_parallel_size is 2"):
        forms(built, caches(layers_of(built)), form="native")


def test_blocks_whose_heads_lie_apart_have_the_canonical_form_alone(
    engine: Callable[..., Any],
) -> None:
    built = engine()
    found = caches(layers_of(built))
    found.kv_cache_layout = "LBNHC"
    assert forms(built, found) == ["canonical", "native"]
    found.kv_cache_layout = "LHBNC"
    assert forms(built, found) == ["canonical"]
    with pytest.raises(InputError, match="LHBNC: the heads of a block lie apart"):
        forms(built, found, form="native")


def test_packed_caches_keep_the_native_form(engine: Callable[..., Any]) -> None:
    built = engine()
    packed = caches(layers_of(built), state_content_bytes=96)
    assert forms(built, packed) == ["native"]
    with pytest.raises(InputError, match="packed or quantised") as refused:
        forms(built, packed, form="canonical")
    assert '"form": "native"' in str(refused.value)


class Recorded:
    """What a worker's side of one form is told."""

    def __init__(self) -> None:
        self.steps: list[StepOrders] = []
        self.layers: list[str] = []

    def begin_step(self, orders: StepOrders) -> None:
        self.steps.append(orders)

    def start_loads(self, orders: StepOrders) -> None:
        self.steps.append(orders)

    def save_layer(self, layer: str) -> None:
        self.layers.append(layer)

    def settle(self) -> None: ...

    def take_results(self, finished: set[str]) -> WorkerResults:
        failed = {name for orders in self.steps for name in orders.failed}
        loaded = {order.request_id for orders in self.steps for order in orders.loads}
        return WorkerResults({n for o in self.steps for n in o.ended}, loaded | failed, failed)


def test_a_workers_orders_go_to_the_form_that_they_name() -> None:
    canonical, native = Recorded(), Recorded()
    sides: Any = {"canonical": canonical, "native": native}
    worker = WorkerForms(sides, threading.Event())
    move = Move(0, 0, BLOCK, (1,))
    ticket: Any = None
    orders = StepOrders(
        saves=[SaveOrder("a", None, (move,), True, "native")],
        loads=[LoadOrder("b", ticket, (move,), "canonical")],
        failed=["c"],
        ended=["d"],
    )
    worker.begin_step(orders)
    worker.save_layer("l")
    worker.start_loads(orders)
    assert canonical.layers == native.layers == ["l"]
    assert all(seen.saves == orders.saves and not seen.loads for seen in native.steps)
    assert all(seen.loads == orders.loads and not seen.saves for seen in canonical.steps)
    # The order does not say in which form the request was saved.
    assert all(seen.ended == ["d"] for seen in (*canonical.steps, *native.steps))
    assert worker.take_results(set()) == WorkerResults({"d"}, {"b", "c"}, {"c"})
