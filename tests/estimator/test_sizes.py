from __future__ import annotations

from dataclasses import replace

import pytest

from prfaas.catalog import Accelerator, Catalog
from prfaas.errors import InputError
from prfaas.estimator.instance import Instance, with_weights
from prfaas.estimator.memory import most_sequences
from prfaas.estimator.sizes import (
    ROOM_FOR_SEQUENCES,
    has_room,
    smallest_instance,
)

CATALOG = Catalog.builtin()


def instance(model: str, accelerator: str, gpus: int = 1) -> Instance:
    found = CATALOG.model(model)
    return Instance(found.model_shape(), found.spec(), CATALOG.accelerator(accelerator), gpus)


@pytest.mark.parametrize(
    ("model", "accelerator"),
    [
        ("qwen3-4b", "h200"),
        ("qwen3-235b-a22b", "h20"),
        ("kimi-k3", "gb200"),
        ("ring-2.5-1t", "b200"),
    ],
)
def test_the_smallest_size_with_room(model: str, accelerator: str) -> None:
    sized = smallest_instance(instance(model, accelerator), 65_536, 16_384)
    assert most_sequences(sized, 16_384) >= ROOM_FOR_SEQUENCES
    if sized.gpus > 1:
        assert not has_room(replace(sized, gpus=sized.gpus // 2), 65_536, 16_384)


def test_a_model_that_no_domain_holds_is_refused() -> None:
    with pytest.raises(InputError, match=r"GB of weights .* do not fit into .* use at least 1"):
        smallest_instance(instance("kimi-k3", "h20"), 65_536, 16_384)
    several = smallest_instance(instance("kimi-k3", "h20"), 65_536, 16_384, across_domains=True)
    assert several.gpus > 8


def test_fewer_bits_need_fewer_gpus() -> None:
    own = instance("qwen3.5-397b-a17b", "b200")
    halved = replace(own, shape=with_weights(own.shape, "fp8"))
    sizes = [smallest_instance(found, 65_536, 16_384).gpus for found in (own, halved)]
    assert sizes[1] < sizes[0]


def test_an_accelerator_needs_an_interconnect() -> None:
    known = CATALOG.accelerator("h200")
    alone = Accelerator("x1", memory_gb=known.memory_gb, interconnect_gbs=known.interconnect_gbs)
    with pytest.raises(InputError, match="does not have interconnect_gpus of x1"):
        smallest_instance(replace(instance("qwen3-4b", "h200"), accelerator=alone), 1024, 1024)
