"""Requests that a decode node serves alone, and what their prefills cost the decodes there.

The decodes of a node stop for the time of the prefill. Where other nodes could have prefilled it,
one decode step comes between two of its chunks, so that the prefill itself takes longer, too.
"""

from __future__ import annotations

from prfaas.config.deployment import AloneSection
from prfaas.scheduler.options import alone_steps, most_computed_tokens
from prfaas.scheduler.request import Route
from prfaas.sim.caches import Caches, Hashes
from prfaas.sim.nodes import SimNode


class ServedAlone:
    def __init__(self, rules: AloneSection) -> None:
        self._rules = rules
        self.served = 0
        self.seconds = 0.0  # for which decode nodes prefilled, all nodes together

    def is_refused(self, chosen: Route, caches: Caches, hashes: Hashes, prompt_tokens: int) -> bool:
        """Whether the decode node refuses the request: it has evicted what the index still has. The
        time of the refusal is neglected."""
        if not chosen.alone or chosen.is_last_resort:
            return False
        expected = prompt_tokens - chosen.cached_tokens
        held = caches.resumable_tokens(chosen.prefill, hashes)
        return prompt_tokens - held > most_computed_tokens(expected, self._rules.chunk_tokens)

    def start(self, node: SimNode, chosen: Route, uncached_tokens: int, prefill_s: float) -> float:
        """Delays the node's decodes. Returns the time of the prefill with the steps between."""
        node.batch.delay(prefill_s)
        self.served += 1
        self.seconds += prefill_s
        if chosen.is_last_resort:
            return prefill_s
        between = alone_steps(uncached_tokens, self._rules.chunk_tokens) - 1
        return prefill_s + between * node.batch.step_s()
