"""Turns counted work into seconds with the fitted constants.

Every time is a sum of parts: matrix products, attention, its softmax, reading weights and KV,
copying activations to experts and back, exchanging activations between GPUs, and fixed times.
`Parts` has them as they would be at the published peaks; the constants say how much of the peaks
engines reach. Engines overlap some parts; the fitted constants account for that on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from prfaas.estimator.efficiency import Efficiencies
from prfaas.estimator.instance import Instance
from prfaas.estimator.work import Work, decode_work, prefill_work

# Two exchanges per layer (after attention, after the experts), each of two bytes per element, of
# which a ring sends nearly twice what it holds.
_EXCHANGED_BYTES = 2 * 2 * 2


class Parts(NamedTuple):
    """Each field is multiplied with one coefficient. Seconds at the peak, unless said otherwise."""

    matrix: float = 0.0
    attention: float = 0.0
    softmax: float = 0.0  # operations of attention per GPU
    memory: float = 0.0
    routed: float = 0.0  # seconds per byte that a routed element moves
    hidden: float = 0.0  # seconds per byte that a hidden element moves
    exchange: float = 0.0
    layers: float = 0.0  # a number
    expert_layers: float = 0.0  # a number

    def seconds(self, constants: Efficiencies) -> float:
        return sum(
            part * factor for part, factor in zip(self, coefficients(constants), strict=True)
        )


def coefficients(constants: Efficiencies) -> Parts:
    return Parts(
        matrix=1 / constants.matrix,
        # The products of attention reach the peak in the points of the slowest GPU (H20), where
        # nothing else takes time. What takes longer on others is counted as softmax.
        attention=1.0,
        softmax=1 / constants.softmax_flops,
        memory=1 / constants.memory,
        routed=constants.routed_bytes,
        hidden=constants.hidden_bytes,
        exchange=1 / constants.exchange,
        layers=constants.decode_layer_s,
        expert_layers=constants.decode_expert_layer_s,
    )


def prefill_s(instance: Instance, constants: Efficiencies, new: int, cached: int = 0) -> float:
    """T_prefill of one prompt: `new` tokens after a prefix of `cached` tokens."""
    fixed: float = getattr(constants.prefill_fixed_s, instance.engine_class)
    return fixed + _prefill_work_s(instance, constants, new, cached)


def decode_s(instance: Instance, constants: Efficiencies, batch: int, context: int) -> float:
    """Time of one decode step of `batch` sequences of `context` tokens."""
    return min(
        decode_parts(instance, max(1.0, batch * tensor / instance.gpus), context, tensor).seconds(
            constants
        )
        for tensor in _tensor_sizes(instance.domain_gpus)
    )


def prefill_parts(
    instance: Instance, new: int, cached: int, tensor: float, packed: bool = False
) -> Parts:
    """Parts of a prefill on `tensor` GPUs that share every layer."""
    chunk = instance.chunk_tokens
    work = prefill_work(instance.shape, instance.spec, new, cached, chunk, tensor, packed)
    return _parts(instance, work, tensor)


def decode_parts(instance: Instance, batch: float, context: int, tensor: float) -> Parts:
    """Parts of a decode step of `batch` sequences on `tensor` GPUs that share every layer."""
    work = decode_work(instance.shape, instance.spec, batch, context, tensor)
    experts = instance.shape.experts
    return _parts(instance, work, tensor)._replace(
        layers=float(instance.shape.layers),
        expert_layers=float(experts.layers if experts is not None else 0),
    )


def pipelined_s(one_stage_s: float, first_chunk_s: float, stages: float) -> float:
    """Time of a prompt in a pipeline, from its times without one. The stages work at the same time
    on different chunks, once the first chunk has passed them all."""
    return one_stage_s / stages + first_chunk_s * (stages - 1) / stages


def _prefill_work_s(instance: Instance, constants: Efficiencies, new: int, cached: int) -> float:
    """The best of the ways to use the GPUs. More GPUs do not share a layer than make it faster."""
    first = min(new, instance.chunk_tokens)
    stages = instance.gpus / instance.domain_gpus
    times = []
    for tensor in _tensor_sizes(instance.domain_gpus):
        whole = prefill_parts(instance, new, cached, tensor).seconds(constants)
        if stages > 1:
            chunk = prefill_parts(instance, first, cached, tensor).seconds(constants)
            whole = pipelined_s(whole, min(chunk, whole), stages)
        times.append(whole)
    return min(times)


def _tensor_sizes(most: float) -> Iterator[float]:
    while most >= 1:
        yield most
        most /= 2


def _parts(instance: Instance, work: Work, tensor: float) -> Parts:
    shape = instance.shape
    common = work.common_flops / instance.peak_flops(shape.weights)
    experts = work.expert_flops / instance.peak_flops(shape.expert_weights)
    bandwidth = instance.memory_bytes_per_s
    exchange = 0.0
    if tensor > 1:
        share = (tensor - 1) / tensor
        exchanged = work.hidden_elements * _EXCHANGED_BYTES * share
        exchange = exchanged / instance.interconnect_bytes_per_s
    return Parts(
        matrix=(common + experts) / tensor,
        attention=work.attention_flops / instance.peak_flops("bf16") / tensor,
        softmax=work.attention_flops / tensor,
        memory=(work.weight_bytes + work.cache_bytes) / tensor / bandwidth,
        routed=work.routed_elements / tensor / bandwidth,
        # Not divided: every GPU has all hidden elements.
        hidden=work.hidden_elements / bandwidth,
        exchange=exchange,
    )
