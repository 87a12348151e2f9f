"""The input and the output of routing. Plain data; named tuples, because one of each is made per
request and the simulator makes millions."""

from __future__ import annotations

from typing import NamedTuple

from prfaas.types import ClusterId, NodeId

ONLY_LOGPROBS = "the prefill makes prompt log-probabilities, and a hand-off transfers only KV"
ONLY_ADAPTER = "remote clusters serve only the base model"
ONLY_MULTIMODAL = "image embeddings are not transferred"
ONLY_TOKEN = "a prompt of one token has nothing to hand off"
ONLY_DECODE = "the decode engine tokenised this chat differently from the gateway"


class Request(NamedTuple):
    """One request, with the fields that routing uses. Cached lengths are in the view."""

    id: int
    prompt_tokens: int
    arrived_s: float = 0.0
    prompt_logprobs: bool = False
    adapter: str = ""  # name of a LoRA adapter; empty: the base model
    multimodal: bool = False
    decode_only: bool = False  # the decode engine refused its hand-off
    no_alone: bool = False  # a decode node had less of it cached than a route expected


class CacheCopy(NamedTuple):
    """A copy of a prefix from one node's cache to another's, made before the prefill."""

    source: NodeId
    target: NodeId
    tokens: int
    nbytes: int  # that the target lacks, with states and windows
    seconds: float  # expected duration


class Route(NamedTuple):
    """The clusters and nodes that serve a request. `reason` is for people: logs, `explain`, the
    timeline."""

    cluster: ClusterId  # of the prefill node
    prefill: NodeId
    decode_cluster: ClusterId
    decode: NodeId
    offloaded: bool  # the prefill runs outside the cluster that decodes
    cached_tokens: int  # the prefill resumes after these, once `copies` are made
    transfer_tokens: int  # tokens whose growing KV is handed off; the decode node has the rest
    nbytes: int  # size of the hand-off: those tokens, and every window and state
    prefill_s: float  # expected duration of the prefill, without waiting
    copies: tuple[CacheCopy, ...]
    reason: str
    # Set where a decode node serves the request alone although other nodes could prefill it: when
    # it may do so again while requests decode there.
    next_alone_s: float | None = None
    # Where the request decodes outside the PD cluster at which it arrived: the round trip between
    # the two, which its first token takes longer.
    round_trip_s: float = 0.0
    # By how much the route changes the credit of each PrfaaS cluster with the decode cluster
    # (`LinkView.credit_tokens`). Empty where the plan's shares decide nothing.
    credits: tuple[tuple[ClusterId, float], ...] = ()

    @property
    def alone(self) -> bool:
        """Whether the decode node prefills for itself, so that there is no hand-off."""
        return self.prefill == self.decode

    @property
    def is_last_resort(self) -> bool:
        """Whether the decode node serves the request alone because there was no other way."""
        return self.alone and self.next_alone_s is None


def alone_reason(request: Request) -> str | None:
    """Why a decode node must prefill the request for itself; None if other nodes may prefill it."""
    if request.prompt_tokens == 1:
        return ONLY_TOKEN
    return local_only_reason(request)


def is_offloadable(request: Request) -> bool:
    """Whether another cluster may prefill the request."""
    return local_only_reason(request) is None


def local_only_reason(request: Request) -> str | None:
    """Why the decode cluster must prefill the request; None if another cluster may."""
    if request.prompt_logprobs:
        return ONLY_LOGPROBS
    if request.adapter:
        return ONLY_ADAPTER
    if request.multimodal:
        return ONLY_MULTIMODAL
    if request.decode_only:
        return ONLY_DECODE
    return None
