"""Short remainders of prompts that decode nodes prefill, and what they cost the decodes there.

The decodes of a node stop for the time of the prefill. Between two chunks of the remainder comes
one decode step, so that the remainder itself takes longer, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from prfaas.config.deployment import RemaindersSection
from prfaas.scheduler.costs import Costs
from prfaas.scheduler.options import remainder_steps
from prfaas.scheduler.request import Route
from prfaas.sim.caches import Caches, Hashes
from prfaas.sim.nodes import SimNode
from prfaas.types import ClusterId


class Remainders:
    def __init__(
        self, rules: RemaindersSection, costs: Mapping[ClusterId, Costs], caches: Caches
    ) -> None:
        """`costs`: of every PD cluster."""
        self._rules = rules
        self._costs = costs
        self._caches = caches
        self.served = 0
        self.seconds = 0.0  # for which decode nodes computed them, all nodes together

    def is_refused(self, chosen: Route, hashes: Hashes, prompt_tokens: int) -> bool:
        """Whether the decode node refuses the remainder: it has evicted what the index still has.
        The time of the refusal is neglected."""
        if not chosen.is_remainder:
            return False
        held = self._caches.resumable_tokens(chosen.prefill, hashes)
        return prompt_tokens - held > self._rules.tokens

    def start(self, node: SimNode, hashes: Hashes, prompt_tokens: int) -> tuple[int, float]:
        """Delays the node's decodes. Returns the cached tokens and the time of the remainder."""
        cached = min(self._caches.resumable_tokens(node.name, hashes), prompt_tokens - 1)
        uncached = prompt_tokens - cached
        prefill_s = self._costs[node.cluster].prefill_s[node.cluster](uncached, cached)
        between = remainder_steps(uncached, self._rules.chunk_tokens) - 1
        node.batch.delay(prefill_s)
        self.served += 1
        self.seconds += prefill_s
        return cached, prefill_s + between * node.batch.step_s()
