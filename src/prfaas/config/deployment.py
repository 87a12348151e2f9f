"""The deployment file: one schema for every command (design: one TOML, unknown keys are errors).

A command that does not use a section still validates it, so that a file that plans also serves.
Units are in the keys. Defaults exist here and nowhere else. What the names refer to (models,
accelerators, profiles) is looked up by the command that needs it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from prfaas.config.strict import decode, parse_toml, read_text
from prfaas.errors import InputError

Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
CountOrZero: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
Amount: TypeAlias = Annotated[float, msgspec.Meta(gt=0)]
AmountOrZero: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]
Share: TypeAlias = Annotated[float, msgspec.Meta(gt=0, le=1)]


class ModelSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    config: str | None = None  # a Hugging Face config.json, relative to the deployment file
    kv_dtype: str | None = None  # of what attention caches; the model's own when absent
    max_tokens: Count = 1_048_576  # prompt and answer together, as the engines were started


# Workloads: lengths are of the *uncached* part of a prompt ----------------------------------------


class Lognormal(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="lognormal"
):
    """exp(N(mu, sigma)) tokens, truncated to [min_tokens, max_tokens]."""

    mu: float
    sigma: Amount
    min_tokens: Count
    max_tokens: Count
    output_tokens: Amount
    cached_tokens: CountOrZero = 0  # prefix already cached in front of the uncached part


class Component(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    weight: Amount
    mu: float
    sigma: Amount
    min_tokens: Count
    max_tokens: Count
    cached_tokens: CountOrZero = 0


class Mixture(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="mixture"
):
    """Several truncated lognormals; weights are relative."""

    components: Annotated[list[Component], msgspec.Meta(min_length=1)]
    output_tokens: Amount


class Trace(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag="trace"):
    """Lengths of a Mooncake-format trace after prefix matching. Output length: the trace's mean."""

    path: str  # .jsonl or .jsonl.xz, relative to the deployment file
    block_tokens: Count = 512  # tokens behind one hash id
    output_tokens: Amount | None = None  # instead of the trace's own mean


WorkloadSection: TypeAlias = Lognormal | Mixture | Trace


class SLO(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    output_tokens_per_s: Amount  # per request; bounds the decode batch
    ttft_s: Amount | None = None  # asked for as "at most this long ...
    ttft_quantile: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.9  # ... for this share"


class Node(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A live engine and the kvd of its host."""

    url: str
    kvd_url: str
    via: str | None = None  # host:port of a relay in front of this kvd, instead of the link's


class Cluster(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    kind: Literal["prfaas", "pd"]
    accelerator: str
    gpus: Count
    gpus_per_instance: Count
    prefill: CountOrZero | None = None  # PD only: instance counts, when the split is fixed
    decode: CountOrZero | None = None
    usd_per_gpu_hour: Amount | None = None  # the catalog's price when absent
    nodes: list[Node] = []

    @property
    def instances(self) -> int:
        return self.gpus // self.gpus_per_instance


class Link(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    rename={"source": "from", "target": "to"},
):
    """Bandwidth from one cluster to another; from a cluster to itself it is its own fabric."""

    source: str
    target: str
    gbps: Amount  # 10^9 bits per second
    rtt_ms: AmountOrZero = 0.0
    via: str | None = None  # host:port of a relay in front of the receiving kvd


class ReplanSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The long-term loop: how often, on how much traffic, and how reluctantly roles change."""

    every_s: Amount = 120.0
    window_s: Amount = 3600.0
    warmup_s: AmountOrZero = 120.0  # caches are cold: cached lengths mean nothing yet
    block_requests: Count = 400  # the least traffic that counts; two like blocks are steady
    min_gain: Share = 0.015  # of throughput, for a change of roles
    threshold_step: Share = 0.02  # a smaller move of the threshold is not worth a plan
    dwell_s: AmountOrZero = 900.0  # a node keeps its role at least this long


class CorrectionSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Profiles follow the prefill times that are observed, by one factor per cluster."""

    correct: bool = True
    limit: Annotated[float, msgspec.Meta(ge=1)] = 4.0  # the factor stays within 1/limit and limit
    warmup_prefills: CountOrZero = 3  # of a node that has just started: caches, compilers, links
    window_prefills: Count = 64  # of a cluster, the newest: their median is what counts
    least_prefills: Count = 8  # with fewer the profile is believed
    least_s: AmountOrZero = 0.1  # of shorter prefills calls and threads are too large a part
    step: Share = 0.05  # a smaller difference is chance


class PaperSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Policy `paper`: when the threshold is raised, and how far (section 3.4.3, short-term). The
    values were searched on traces, calm and troubled (`prfaas bench policies --tune`)."""

    surge_wait_s: Amount = 8.0  # PrfaaS makes a request wait so much longer than the PD cluster
    calm_wait_s: AmountOrZero = 2.0  # below this, and with a clear link, it comes down again
    step: Annotated[float, msgspec.Meta(ge=1)] = 2.0  # the factor moves by this, up or down ...
    limit: Annotated[float, msgspec.Meta(ge=1)] = 2.0  # ... up to this; 1 turns it off
    hold_s: AmountOrZero = 5.0  # between two moves: a queue needs time to show what one did


class AdaptiveSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Policy `adaptive`: what a second of a scarce resource costs beside the request's own time."""

    congestion_price: AmountOrZero = 1.0  # of work, in seconds of wait it brings to those behind
    least_price_s: AmountOrZero = 2.0  # the plan counts for so much even when nobody waits
    copy_margin_s: AmountOrZero = 0.05  # a copied prefix must save more than this
    queue_s: AmountOrZero = 0.5  # nodes with more work than this get no more; the router keeps it
    # A waiting prefill lets shorter ones pass that arrive within patience * (its seconds)^2 ...
    patience: AmountOrZero = 2.0
    overtaken_share: AmountOrZero = 0.25  # ... and within this share of the wait that it found
    # A new request takes a free node ahead of the line unless the first request in the line is
    # overdue by more than this share of the prefill time that waits there for each node.
    overdue_share: AmountOrZero = 0.5


class MovesSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Copies of hot prefixes, beside those that routes ask for. The gateway that plans makes
    them."""

    replicate: bool = True
    saturated_s: Amount = 0.5  # where every holder makes a prefill wait longer, one more is made
    every_s: Amount = 1.0  # at most one replication in so long, ...
    at_once: Count = 2  # ... and so many copies of hot prefixes under way
    evacuate_s: AmountOrZero = 5.0  # hot prefixes leave a node so long before it drains; 0: never


class SchedulerSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    policy: Literal["paper", "adaptive", "local", "remote"] = "adaptive"
    threshold_tokens: CountOrZero | None = None  # fixed instead of optimised
    replan: ReplanSection = ReplanSection()
    correction: CorrectionSection = CorrectionSection()
    paper: PaperSection = PaperSection()
    adaptive: AdaptiveSection = AdaptiveSection()
    moves: MovesSection = MovesSection()


class CacheSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prefixes kept on every node."""

    gb_per_node: Amount = 1000.0  # 10^9 bytes; host memory counts


class Key(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An API key: itself, or a file that holds it. Keys of different tenants share no cache."""

    key: str | None = None
    file: str | None = None  # relative to the deployment file
    tenant: str = ""


class GatewaySection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 8080  # 0: any free one
    tokenizer: str | None = None  # a checkpoint's folder; without it prompts are token ids only
    keys: list[Key] = []  # empty means: no authentication
    plans: bool = True  # exactly one of several gateways plans
    advise: bool = False  # it says what the traffic asks for, and leaves threshold and roles alone
    max_in_flight: Count = 2048  # requests; more are told to come back
    max_body_mb: Amount = 64.0  # 10^6 bytes; a million token ids as JSON are some 8 MB
    max_bodies_mb: Amount = 1024.0  # of all requests in flight together
    body_s: Amount = 30.0  # a client has so long to send its request
    stall_s: Amount = 120.0  # a client that reads nothing for so long is given up


class Deployment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: ModelSection
    workload: WorkloadSection
    slo: SLO
    clusters: Annotated[list[Cluster], msgspec.Meta(min_length=1)]
    links: list[Link] = []
    scheduler: SchedulerSection = SchedulerSection()
    cache: CacheSection = CacheSection()
    gateway: GatewaySection = GatewaySection()
    catalog: list[str] = []  # catalog files to add, relative to the deployment file

    def of_kind(self, kind: Literal["prfaas", "pd"]) -> list[Cluster]:
        return [cluster for cluster in self.clusters if cluster.kind == kind]

    def link(self, source: str, target: str) -> Link | None:
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        return None


def load_deployment(path: str | Path) -> Deployment:
    return parse_deployment(parse_toml(read_text(path), path), path)


def parse_deployment(raw: dict[str, Any], file: str | Path) -> Deployment:
    deployment = decode(raw, Deployment, file)
    try:
        _check_clusters(deployment)
        _check_links(deployment)
        _check_workload(deployment)
        _check_keys(deployment.gateway)
    except InputError as error:
        raise error.in_file(file) from None
    return deployment


def _check_clusters(deployment: Deployment) -> None:
    names = [cluster.name for cluster in deployment.clusters]
    for index, cluster in enumerate(deployment.clusters):
        at = f"clusters.{index}"
        if names.index(cluster.name) != index:
            raise InputError(
                f"{cluster.name!r} is taken", where=f"{at}.name", fix="name clusters apart"
            )
        if cluster.instances == 0:
            raise InputError(
                f"{cluster.gpus} GPUs are less than one instance of {cluster.gpus_per_instance}",
                where=f"{at}.gpus",
                fix="add GPUs or lower gpus_per_instance",
            )
        fixed = (cluster.prefill, cluster.decode)
        if fixed == (None, None):
            continue
        if cluster.kind == "prfaas":
            raise InputError(
                "a prfaas cluster only prefills", where=at, fix="remove prefill and decode"
            )
        if cluster.prefill is None or cluster.decode is None:
            raise InputError("half a split", where=at, fix="give both prefill and decode, or none")
        if cluster.prefill + cluster.decode != cluster.instances:
            raise InputError(
                f"prefill {cluster.prefill} + decode {cluster.decode} is not "
                f"{cluster.gpus} / {cluster.gpus_per_instance} = {cluster.instances} instances",
                where=at,
                fix="make them add up",
            )
        if cluster.decode == 0:
            raise InputError(
                "no decode instances: nothing could answer", where=f"{at}.decode", fix="give one"
            )
    if not deployment.of_kind("pd"):
        raise InputError(
            "no cluster of kind 'pd': nothing could decode", where="clusters", fix="add one"
        )


def _check_links(deployment: Deployment) -> None:
    names = {cluster.name for cluster in deployment.clusters}
    seen = set()
    for index, link in enumerate(deployment.links):
        for key, name in (("from", link.source), ("to", link.target)):
            if name not in names:
                raise InputError(
                    f"no cluster is named {name!r}",
                    where=f"links.{index}.{key}",
                    fix=f"clusters are: {', '.join(sorted(names))}",
                )
        if (link.source, link.target) in seen:
            raise InputError(
                f"a second link from {link.source!r} to {link.target!r}",
                where=f"links.{index}",
                fix="state the aggregate bandwidth once",
            )
        seen.add((link.source, link.target))
        if link.gbps > 1e6:
            raise InputError(
                f"{link.gbps:g} Gbit/s is beyond any link",
                where=f"links.{index}.gbps",
                fix="the unit is 10^9 bits per second",
            )
        if link.rtt_ms > 1e4:
            raise InputError(
                f"{link.rtt_ms:g} ms is longer than any path",
                where=f"links.{index}.rtt_ms",
                fix="the unit is milliseconds",
            )
    for index, cluster in enumerate(deployment.clusters):
        targets = [pd.name for pd in deployment.of_kind("pd")]
        if cluster.kind == "prfaas" and not any(deployment.link(cluster.name, t) for t in targets):
            raise InputError(
                f"no link leads from {cluster.name!r} to a pd cluster",
                where=f"clusters.{index}",
                fix=f"add [[links]] with from = {cluster.name!r}, to = {targets[0]!r}",
            )


def _check_workload(deployment: Deployment) -> None:
    workload = deployment.workload
    parts: list[tuple[str, Lognormal | Component]] = []
    if isinstance(workload, Lognormal):
        parts = [("workload", workload)]
    elif isinstance(workload, Mixture):
        parts = [(f"workload.components.{i}", c) for i, c in enumerate(workload.components)]
    for at, part in parts:
        if part.min_tokens > part.max_tokens:
            raise InputError(
                f"{part.min_tokens} is above max_tokens = {part.max_tokens}",
                where=f"{at}.min_tokens",
                fix="swap them",
            )
        if part.max_tokens > 16_777_216:
            raise InputError(
                f"{part.max_tokens} is beyond 16,777,216 tokens", where=f"{at}.max_tokens"
            )
        if not -5 <= part.mu <= 20:
            raise InputError(
                f"exp({part.mu:g}) tokens is no plausible median",
                where=f"{at}.mu",
                fix="mu is the mean of the natural logarithm of the length",
            )
    threshold = deployment.scheduler.threshold_tokens
    if threshold is not None and parts:
        longest = max(part.max_tokens for _, part in parts)
        if threshold > longest:
            raise InputError(
                f"{threshold} is above the longest prompt ({longest} tokens)",
                where="scheduler.threshold_tokens",
                fix="lower it, or use policy 'local' to never offload",
            )


def _check_keys(gateway: GatewaySection) -> None:
    for index, key in enumerate(gateway.keys):
        if (key.key is None) == (key.file is None):
            raise InputError(
                "a key is given as itself or as a file",
                where=f"gateway.keys.{index}",
                fix="give either key or file",
            )
        if key.key == "":
            raise InputError("is empty", where=f"gateway.keys.{index}.key", fix="give one")
