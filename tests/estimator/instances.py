"""Instances for tests."""

from __future__ import annotations

from prfaas.catalog import Accelerator, Catalog
from prfaas.catalog.provenance import Sourced
from prfaas.estimator.instance import Instance

CATALOG = Catalog.builtin()


def instance(
    model: str = "qwen3.5-397b-a17b", accelerator: str | Accelerator = "h200", gpus: int = 8
) -> Instance:
    entry = CATALOG.model(model)
    if isinstance(accelerator, str):
        accelerator = CATALOG.accelerator(accelerator)
    return Instance(entry.model_shape(), entry.spec(), accelerator, gpus)


def accelerator(**figures: float) -> Accelerator:
    """An accelerator with round figures, some of them replaced."""
    common = {
        "bf16_tflops": 1000.0,
        "memory_gb": 100.0,
        "memory_tbps": 4.0,
        "interconnect_gbs": 900.0,
        "interconnect_gpus": 8.0,
    }
    return Accelerator(
        name="test",
        **{
            name: Sourced(value, "published", "test")
            for name, value in {**common, **figures}.items()
        },
    )
