"""Turns counted work into seconds with the fitted efficiencies.

A prefill is a fixed time, plus for each pass and layer a fixed time, plus matrix products at a
share of the peak arithmetic, plus attention at another share, plus what memory and the links
between GPUs move. The parts are added: engines overlap them only partly, and the fit of the shares
accounts for that. A decode step has the same parts with fixed times of its own.
"""

from __future__ import annotations

from prfaas.estimator.efficiency import Efficiencies
from prfaas.estimator.instance import Instance
from prfaas.estimator.work import Work, decode_work, prefill_work

# Two exchanges per layer (after attention, after the experts), each of two bytes per element, of
# which a ring sends nearly twice what it holds.
_EXCHANGED_BYTES = 2 * 2 * 2


def prefill_s(instance: Instance, constants: Efficiencies, new: int, cached: int = 0) -> float:
    work = prefill_work(instance.shape, instance.spec, new, cached, instance.chunk_tokens)
    fixed = constants.prefill_fixed_s + work.passes * work.layers * constants.layer_s
    return constants.prefill_scale * (fixed + _moving_and_computing_s(instance, constants, work))


def decode_s(instance: Instance, constants: Efficiencies, batch: int, context: int) -> float:
    work = decode_work(instance.shape, instance.spec, batch, context)
    fixed = constants.decode_fixed_s + work.layers * constants.decode_layer_s
    return constants.decode_scale * (fixed + _moving_and_computing_s(instance, constants, work))


def _moving_and_computing_s(instance: Instance, constants: Efficiencies, work: Work) -> float:
    gpus, shape = instance.gpus, instance.shape
    common = work.common_flops / instance.peak_flops(shape.weights)
    experts = work.expert_flops / instance.peak_flops(shape.expert_weights)
    attention = work.attention_flops / instance.peak_flops("bf16")
    computing = (common + experts) / constants.matrix + attention / constants.attention
    read = (work.weight_bytes + work.cache_bytes) / gpus / constants.memory
    # Activations between kernels are not divided: every GPU has all hidden elements.
    moved = work.hidden_elements * constants.hidden_bytes / constants.memory
    exchanged = 0.0
    if gpus > 1:
        share = (gpus - 1) / gpus
        exchanged = work.hidden_elements * _EXCHANGED_BYTES * share / constants.exchange
    return (
        computing / gpus
        + (read + moved) / instance.memory_bytes_per_s
        + exchanged / instance.interconnect_bytes_per_s
    )
