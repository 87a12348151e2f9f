"""What the router is asked, and what it answers. Plain data; named tuples, because one of each is
made per request and the simulator makes millions."""

from __future__ import annotations

from typing import NamedTuple

from prfaas.types import ClusterId, NodeId


class Request(NamedTuple):
    """One request as far as routing cares. Cached lengths are not its own: the view has them."""

    id: int
    prompt_tokens: int
    arrived_s: float = 0.0
    prompt_logprobs: bool = False
    adapter: str = ""  # a LoRA; empty: the base model
    multimodal: bool = False
    decode_only: bool = False  # a hand-off of it was refused by the engine that was to go on


class CacheCopy(NamedTuple):
    """Before the prefill: bring a prefix of `tokens` tokens from one node's cache to another's."""

    source: NodeId
    target: NodeId
    tokens: int
    nbytes: int  # what the target lacks of it, states and windows included
    seconds: float  # it is expected to take


class Route(NamedTuple):
    """Where a request goes. `reason` is for people: logs, `explain`, the timeline."""

    cluster: ClusterId  # of the prefill node
    prefill: NodeId
    decode: NodeId
    offloaded: bool  # prefilled outside the cluster that decodes
    cached_tokens: int  # the prefill resumes after these, once `copies` are made
    transfer_tokens: int  # growing KV of so many tokens is handed off; the decode node has the rest
    nbytes: int  # of the hand-off: those tokens, and every window and state
    prefill_s: float  # what the prefill is expected to take, without waiting
    copies: tuple[CacheCopy, ...]
    reason: str


def is_offloadable(request: Request) -> bool:
    """Whether another cluster may prefill it."""
    return local_only_reason(request) is None


def local_only_reason(request: Request) -> str | None:
    """Why a request must be prefilled where it is decoded; None when it need not."""
    if request.prompt_logprobs:
        return "prompt log-probabilities are made by the prefill, and only KV travels"
    if request.adapter:
        return "remote clusters serve the base model"
    if request.multimodal:
        return "image embeddings do not travel"
    if request.decode_only:
        return "its decode engine makes other tokens of it than the gateway"
    return None
