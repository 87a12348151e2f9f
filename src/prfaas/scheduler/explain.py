"""Explains the route of a request: every alternative with its predicted time to first token.

This is computed on demand; `route` itself does not build it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from prfaas.scheduler.adaptive import alternatives, option_cost_s
from prfaas.scheduler.forecast import Forecast, forecast
from prfaas.scheduler.options import Option, alone_option
from prfaas.scheduler.plan import Plan
from prfaas.scheduler.request import CacheCopy, Request, Route, alone_reason
from prfaas.scheduler.sets import Choice
from prfaas.scheduler.short_term import reachable_remotes
from prfaas.scheduler.state import ShortTermState
from prfaas.scheduler.view import View
from prfaas.scheduler.waiting import Hold
from prfaas.types import ClusterId, NodeId


class Alternative(NamedTuple):
    cluster: ClusterId
    node: NodeId
    cached_tokens: int
    copies: tuple[CacheCopy, ...]
    forecast: Forecast
    cost_s: float | None  # what policy `adaptive` compares; None under another policy
    alone: bool  # the decode node prefills for itself, without a hand-off
    declined: str = ""  # why the policy does not take a decode node alone, whatever it costs


class Explanation(NamedTuple):
    chosen: Route | Hold
    threshold_tokens: float  # in effect now, with the short-term factor
    alternatives: tuple[Alternative, ...]  # ordered by predicted time to first token


def explain(
    choice: Choice, views: Sequence[View], request: Request, plan: Plan, state: ShortTermState
) -> Explanation:
    """Explains a decision. `views`: one for each set of nodes with equal KV formats; the
    alternatives are those of every set."""
    found = [
        Alternative(
            o.cluster,
            o.node,
            o.cached_tokens,
            o.copies,
            forecast(request, o, view, state),
            option_cost_s(request, o, view, plan, state)
            if state.rules.policy == "adaptive"
            else None,
            o.alone,
            declined,
        )
        for view in views
        for o, declined in _options(request, view, state)
    ]
    found.sort(key=lambda alternative: alternative.forecast.ttft_s)
    return Explanation(
        chosen=choice.taken,
        threshold_tokens=plan.threshold_tokens * state.threshold_factor,
        alternatives=tuple(found),
    )


def _options(request: Request, view: View, state: ShortTermState) -> list[tuple[Option, str]]:
    """Every way to serve the request, and why the policy declines it."""
    others: list[Option] = []
    if alone_reason(request) is None:
        others = alternatives(request, view, state, reachable_remotes(request, view))
    found = [(option, "") for option in others]
    declined = ""
    alone: Option | None = None
    if others and state.rules.policy == "adaptive":
        alone = alone_option(request, view, state, by_choice=True)
        declined = (
            "no decode node has a free slot, memory and an idle moment for it, or the requests "
            f"that decode there would slow down by more than {state.rules.alone.slowdown:.0%}"
        )
    elif others:
        declined = f"policy {state.rules.policy} does so only where no prefill node can"
    if alone is not None:
        return [*found, (alone, "")]
    last = alone_option(request, view, state, by_choice=False)
    return found if last is None else [*found, (last, declined)]
