"""The schema of the deployment file: one TOML file for every command.

A command that does not use a section still validates it, so that a file that plans also serves.
Units are in the keys. Every default is defined here, in `config.gateway` or in `config.host`, and
nowhere else. The command that needs a model, accelerator or profile looks its name up. The string
below a field is its entry in docs/configuration.md (`make docs`).
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from prfaas.config.fields import Amount, AmountOrZero, Count, CountOrZero, Share
from prfaas.config.gateway import GatewaySection


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model that the deployment serves."""

    name: str
    """Name of the model, in the catalog and in the API."""
    config: str | None = None
    """Hugging Face config.json of the model, relative to the deployment file. Without it, the
    catalog describes the model."""
    kv_dtype: str | None = None
    """Number format of the KV cache. The default is the model's own."""
    max_tokens: Count = 1_048_576
    """Longest prompt and response together, as the engines were started."""
    weights: Literal["bf16", "fp8", "int4", "fp4"] | None = None
    """Number format of the weights, for estimated times and memory. The default is the model's
    own."""
    chunk_tokens: Count | None = None
    """Tokens of one pass of a chunked prefill, for estimated times. The default is that of vLLM
    and SGLang on data-center GPUs."""
    engine_class: Literal["paper", "sglang", "vllm"] = "paper"
    """Engines whose fixed time per prefill estimated times contain: those that the paper measured,
    or SGLang or vLLM as others measure them, which are several times shorter
    (docs/estimates.md)."""


# Workloads: lengths are those of the *uncached* part of a prompt ----------------------------------


class Lognormal(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"
):
    """Uncached prompt lengths of exp(N(mu, sigma)) tokens, truncated to [min_tokens,
    max_tokens]."""

    mu: float
    """Mean of the natural logarithm of the length."""
    sigma: Amount
    """Standard deviation of the natural logarithm of the length."""
    min_tokens: Count
    """Shortest uncached prompt."""
    max_tokens: Count
    """Longest uncached prompt."""
    output_tokens: Amount
    """Mean response length."""
    cached_tokens: CountOrZero = 0
    """Length of the cached prefix before the uncached part."""


class Component(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One truncated lognormal distribution of a mixture."""

    weight: Amount
    """Weight relative to the other components."""
    mu: float
    """Mean of the natural logarithm of the length."""
    sigma: Amount
    """Standard deviation of the natural logarithm of the length."""
    min_tokens: Count
    """Shortest uncached prompt."""
    max_tokens: Count
    """Longest uncached prompt."""
    cached_tokens: CountOrZero = 0
    """Length of the cached prefix before the uncached part."""


class Mixture(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mixture"
):
    """Uncached prompt lengths of several truncated lognormal distributions."""

    components: Annotated[list[Component], msgspec.Meta(min_length=1)]
    """The distributions and their weights."""
    output_tokens: Amount
    """Mean response length."""


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Lengths of a trace in Mooncake's format, after prefix matching."""

    path: str
    """Trace file (.jsonl or .jsonl.xz), relative to the deployment file."""
    block_tokens: Count = 512
    """Tokens that one hash id of the trace stands for."""
    output_tokens: Amount | None = None
    """Mean response length. The default is the trace's mean."""


WorkloadSection: TypeAlias = Lognormal | Mixture | Trace


class SLO(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The service level that the deployment must reach."""

    output_tokens_per_s: Amount
    """Decode rate of each request. It bounds the decode batch."""
    ttft_s: Amount | None = None
    """Longest time to first token, for the share of requests in `ttft_quantile`."""
    ttft_quantile: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.9
    """Share of requests for which `ttft_s` must hold."""


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A running engine and the kvd of its host."""

    url: str
    """URL of the engine's API."""
    kvd_url: str
    """URL of the kvd's HTTP API."""
    via: str | dict[str, str] | None = None
    """HOST:PORT of a relay to this kvd, or a relay for each cluster that sends to it: `via = {
    north = "10.0.0.1:7000" }`. It replaces the relay of the link."""


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster of equal instances. Where there are several pd clusters, each may have a workload
    of its own, `[clusters.workload]`; without it, its traffic has the lengths of `[workload]`."""

    name: str
    """Name of the cluster."""
    kind: Literal["prfaas", "pd"]
    """Kind: `prfaas` only prefills for other clusters, `pd` prefills and decodes."""
    accelerator: str
    """Accelerator of the cluster, as the catalog names it."""
    gpus: Count
    """GPUs of the cluster."""
    gpus_per_instance: Count
    """GPUs of one instance."""
    prefill: CountOrZero | None = None
    """Prefill instances of a pd cluster whose split is fixed. Set with `decode`, or not at all."""
    decode: CountOrZero | None = None
    """Decode instances of a pd cluster whose split is fixed."""
    usd_per_gpu_hour: Amount | None = None
    """Price. The default is the catalog's."""
    traffic_share: Share | None = None
    """Share of all requests that arrive at this pd cluster. Set it on every pd cluster, with a sum
    of 1, or on none: then each has the same share."""
    workload: WorkloadSection | None = None
    nodes: list[Node] = []
    """Running nodes of the cluster. Further nodes may register themselves."""

    @property
    def instances(self) -> int:
        return self.gpus // self.gpus_per_instance


class Link(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"source": "from", "target": "to"},
):
    """Bandwidth from one cluster to another. A link from a cluster to itself is its fabric."""

    source: str
    """Cluster that sends."""
    target: str
    """Cluster that receives."""
    gbps: Amount
    """Aggregate bandwidth in 10^9 bits per second."""
    rtt_ms: AmountOrZero = 0.0
    """Round-trip time in milliseconds."""
    via: str | None = None
    """HOST:PORT of a relay to the receiving kvd."""


class GatewayEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A gateway that receives the requests of one pd cluster (`prfaas gateway --cluster NAME`).
    Without any entry, one gateway serves all clusters. With entries, every pd cluster has one."""

    cluster: str
    """The pd cluster at which the gateway's requests arrive."""
    url: str
    """URL at which the other gateways reach this one: http://HOST:PORT or https://HOST:PORT. The
    gateway listens on this port, unless `prfaas gateway --port` names another."""

    @property
    def port(self) -> int:
        """The port of the URL, which `config.deployment_file` has checked."""
        port = urlsplit(self.url).port
        assert port is not None
        return port


class ReplanSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The long-term loop: how often it plans, on how much traffic, and when roles change."""

    every_s: Amount = 120.0
    """Interval between two plans."""
    window_s: Amount = 3600.0
    """Longest window of past traffic that a plan uses."""
    warmup_s: AmountOrZero = 120.0
    """Time after the start in which cached lengths are ignored, because caches are cold."""
    block_requests: Count = 400
    """Smallest number of requests that a plan uses. Traffic is steady when two blocks of this size
    are alike."""
    min_gain: Share = 0.015
    """Smallest relative gain of throughput for which roles change."""
    dwell_s: AmountOrZero = 900.0
    """Minimum time that a node keeps its role."""


class CorrectionSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Correction of profiles by observed prefill times: a factor for each cluster, and the pace of
    nodes that differ from their like."""

    correct: bool = True
    """Whether profiles are corrected."""
    limit: Annotated[float, msgspec.Meta(ge=1)] = 1000.0
    """Largest factor. The smallest one is 1 / limit."""
    least_s: AmountOrZero = 0.1
    """Shortest prefill that counts. Overheads dominate shorter ones."""


class PaperSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Policy `paper`: when the threshold is raised, and how far (section 3.4.3, short-term). The
    values were searched on traces, calm and stressed."""

    surge_wait_s: Amount = 8.0
    """The threshold is raised when PrfaaS adds this much more wait than the PD cluster."""
    calm_wait_s: AmountOrZero = 2.0
    """The threshold is lowered when the added wait is below this and the link is clear."""
    step: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    """Factor of one change of the threshold."""
    limit: Annotated[float, msgspec.Meta(ge=1)] = 2.0
    """Largest factor by which the threshold is raised; 1 disables raising."""
    hold_s: AmountOrZero = 5.0
    """Minimum time between two changes, so that queues show the effect of the first."""


class AdaptiveSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Policy `adaptive`: the price of a second of a scarce resource, beside the request's own
    time."""

    least_price_s: AmountOrZero = 2.0
    """Weight of the plan in seconds when no request waits."""
    copy_margin_s: AmountOrZero = 0.05
    """Smallest saving for which a prefix is copied."""
    queue_s: AmountOrZero = 0.5
    """A node with more queued work than this receives no more; the request waits in the gateway."""
    patience: AmountOrZero = 2.0
    """A waiting prefill lets shorter ones pass that arrive within patience * (its seconds)^2."""
    overtaken_share: AmountOrZero = 0.25
    """Shorter prefills may pass only within this share of the wait that the request found."""
    overdue_share: AmountOrZero = 0.5
    """A new request takes a free node before the queue unless the first queued request is overdue
    by more than this share of the queued prefill time per node."""


class AloneSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Requests that a decode node serves alone: it prefills for itself, without a hand-off. Where
    there is no other way, every policy does so. Policy `adaptive` also does so where it predicts
    the least cost, such as for the short remainder of a prompt that the node has cached."""

    chunk_tokens: Count = 512
    """Tokens of such a prompt that `prfaas node` computes between two decode steps, where other
    nodes could have prefilled it. About as many make a GPU's arithmetic as long as its reading of
    the weights, which a decode step also takes, so that smaller chunks would not be much faster.
    vLLM cuts prompts by its own settings."""
    margin_s: AmountOrZero = 0.1
    """Smallest predicted saving for which a decode node prefills although other nodes could."""
    slowdown: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.04
    """Largest mean rise of the inter-token latency on a decode node by such prefills, as predicted.
    The default keeps the observed rise below 5%. After a prefill of t seconds a node that decodes
    takes the next one no sooner than t * (1 + 1 / slowdown) later."""


class MovesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Copies of hot prefixes, beside those that routes request. The gateway that plans makes
    them."""

    replicate: bool = True
    """Whether hot prefixes are replicated."""
    saturated_s: Amount = 0.5
    """A prefix is replicated where each holder makes a prefill wait longer than this."""
    every_s: Amount = 1.0
    """Minimum time between two replications."""
    at_once: Count = 2
    """Copies of hot prefixes in flight."""
    evacuate_s: AmountOrZero = 5.0
    """Hot prefixes leave a node this long before it drains; 0 disables evacuation."""


class SchedulerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The scheduler: routing and planning."""

    policy: Literal["paper", "adaptive", "local", "remote"] = "adaptive"
    """Routing policy: `local` never offloads, `remote` always does."""
    threshold_tokens: CountOrZero | None = None
    """Fixed threshold. Without it, the planner optimises the threshold."""
    decode_elsewhere: bool = True
    """Whether a request may decode in another pd cluster where its own cannot serve it: no node
    decodes or prefills for it there, or every decode slot is taken. Only between pd clusters that
    have a link, whose round trip the request then takes longer. Such a link has no other use, so
    that stating it allows this, and `false` forbids it."""
    replan: ReplanSection = ReplanSection()
    correction: CorrectionSection = CorrectionSection()
    paper: PaperSection = PaperSection()
    adaptive: AdaptiveSection = AdaptiveSection()
    alone: AloneSection = AloneSection()
    moves: MovesSection = MovesSection()


class CacheSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefixes that each node keeps, for planning and simulation."""

    gb_per_node: Amount = 1000.0
    """Cache size of a node in 10^9 bytes, host memory included."""


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The keys and sections of the deployment file."""

    model: ModelSection
    workload: WorkloadSection
    slo: SLO
    clusters: Annotated[list[Cluster], msgspec.Meta(min_length=1)]
    links: list[Link] = []
    gateways: list[GatewayEntry] = []
    scheduler: SchedulerSection = SchedulerSection()
    cache: CacheSection = CacheSection()
    gateway: GatewaySection = GatewaySection()
    catalog: list[str] = []
    """Catalog files to add to the built-in catalog, relative to the deployment file."""

    def of_kind(self, kind: Literal["prfaas", "pd"]) -> list[Cluster]:
        return [cluster for cluster in self.clusters if cluster.kind == kind]

    @property
    def traffic_shares(self) -> dict[str, float]:
        """The share of all requests that arrive at each pd cluster, by name. They sum to 1: what
        is missing by rounding (three times 0.333) is divided among all."""
        stated = {pd.name: pd.traffic_share or 1.0 for pd in self.of_kind("pd")}
        total = sum(stated.values())
        return {name: share / total for name, share in stated.items()}

    def workload_of(self, cluster: Cluster) -> WorkloadSection:
        """The traffic of a pd cluster: its own workload, or that of the file."""
        return self.workload if cluster.workload is None else cluster.workload

    def gateway_of(self, cluster: str) -> GatewayEntry | None:
        """The entry of the gateway that receives the requests of this pd cluster."""
        return next((entry for entry in self.gateways if entry.cluster == cluster), None)

    def link(self, source: str, target: str) -> Link | None:
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return None
