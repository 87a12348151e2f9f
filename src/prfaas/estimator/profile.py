"""An estimated profile of an instance, in the catalog's form."""

from __future__ import annotations

from prfaas.catalog.hardware import DecodePoint, PrefillPoint, ProfileRecord
from prfaas.estimator.efficiency import Efficiencies, fitted
from prfaas.estimator.instance import Instance
from prfaas.estimator.memory import most_sequences, require_fit
from prfaas.estimator.times import decode_s, prefill_s

NEW_TOKENS = (128, 1024, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576)
CACHED_TOKENS = (0, 8192, 32768, 131072)
MOST_SEQUENCES = 1024  # vLLM's max_num_seqs on data-center GPUs
SOURCE = "counted work and fitted constants (docs/estimates.md)"
ENGINE = "a serving engine with tensor parallelism"


def estimated_profile(
    instance: Instance, context: int, constants: Efficiencies | None = None
) -> ProfileRecord:
    """Prefill times with and without a cached prefix, and decode steps of sequences of `context`
    tokens up to the batch that fits into memory. Raises if the model does not fit."""
    constants = constants or fitted()
    require_fit(instance, context)
    largest = min(most_sequences(instance, context), MOST_SEQUENCES)
    batches = [2**power for power in range(largest.bit_length()) if 2**power < largest]
    return ProfileRecord(
        model=instance.shape.name,
        accelerator=instance.accelerator.name,
        gpus=instance.gpus,
        status="estimated",
        source=SOURCE,
        engine=ENGINE,
        prefill=[
            PrefillPoint(
                new=new, cached=cached, seconds=prefill_s(instance, constants, new, cached)
            )
            for cached in CACHED_TOKENS
            for new in NEW_TOKENS
        ],
        decode=[
            DecodePoint(batch=batch, step_s=decode_s(instance, constants, batch, context))
            for batch in (*batches, largest)
        ],
    )
