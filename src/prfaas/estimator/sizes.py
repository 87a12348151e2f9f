"""The size of an instance: how many GPUs a model needs, and how many an interconnect joins."""

from __future__ import annotations

from dataclasses import replace

from prfaas.errors import InputError
from prfaas.estimator.instance import Instance
from prfaas.estimator.memory import most_sequences, require_fit

MOST_GPUS = 64
# An instance has room for this many decoding sequences: with fewer, each step reads all weights for
# almost no tokens.
ROOM_FOR_SEQUENCES = 16


def smallest_instance(
    instance: Instance, longest: int, context: int, *, across_domains: bool = False
) -> Instance:
    """The instance with the smallest power of two of GPUs that holds the model, a sequence of
    `longest` tokens, and a decode batch of sequences of `context` tokens; within one interconnect
    domain, unless a pipeline may go across several. Raises if not even the largest instance holds
    the model and the sequence."""
    most = MOST_GPUS if across_domains else min(MOST_GPUS, joined_gpus(instance))
    largest = 1
    while largest * 2 <= most:
        largest *= 2
    gpus = 1
    while gpus < largest and not has_room(replace(instance, gpus=gpus), longest, context):
        gpus *= 2
    sized = replace(instance, gpus=gpus)
    if not has_room(sized, longest, context):
        # Room for a few sequences is still a plan; no room for one is not.
        require_fit(sized, longest)
    return sized


def has_room(instance: Instance, longest: int, context: int) -> bool:
    if most_sequences(instance, longest) < 1:
        return False
    return most_sequences(instance, context) >= ROOM_FOR_SEQUENCES


def joined_gpus(instance: Instance) -> int:
    """GPUs of one interconnect domain of this accelerator."""
    figure = instance.accelerator.interconnect_gpus
    if figure is None:
        raise InputError(
            f"the catalog does not have interconnect_gpus of {instance.accelerator.name}, so its "
            "times cannot be estimated",
            where=f"accelerators.{instance.accelerator.name}.interconnect_gpus",
            fix="add it in a catalog file as [[accelerators]], or measure a profile",
        )
    return int(figure.value)
