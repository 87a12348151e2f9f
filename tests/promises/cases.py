"""Drawn cases: a deployment, its traffic, what happens meanwhile, and a policy.

A case is plain data that knows neither the simulator nor a gateway; `cases` is the hypothesis
strategy that draws it. The simulated tests run it through `sim_cases`, the live ones through
processes. It is relative where the two differ: events begin and end at shares of the duration of
the traffic, rates are parts of about what the nodes of a home carry by their profiles, and paces
and the factors of events multiply what the profiles and the links state. So the caller chooses how
long a case takes.

    case.deployment.clusters    PD clusters first; nodes are named CLUSTER-NUMBER, prefill first
    case.deployment.links       hand-offs (PrfaaS to PD), copies (PD to PrfaaS), PD to PD
    case.traffic                one entry per PD cluster, in their order
    case.events                 in no order; they may overlap, and may concern what is lost already
    describe(case)              the case for a person
    serving_homes(case)         where a node is present that can decode, before any event

Every node of a PD cluster can decode: where none of its nodes has this role, those that prefill
serve requests alone. A node of a PrfaaS cluster never decodes.

The file of a deployment must state at least one node of each cluster, and one that decodes in each
PD cluster. Where a case has none, the stated one is absent: its process has never been started.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hypothesis import strategies as st

Policy: TypeAlias = Literal["adaptive", "paper", "local", "remote"]
Lengths: TypeAlias = Literal["short", "mixed", "long"]
EventKind: TypeAlias = Literal[
    "node_lost",  # its process is killed, and comes back empty
    "cluster_lost",  # all nodes of a cluster at once
    "drained",  # the operator drains a cluster, and takes it back into use
    "slow",  # a node's prefills take `factor` times as long
    "link_cut",
    "link_thin",  # the link has the part `factor` of its bandwidth
    "flood",  # a home sends `factor` times its rate
    "gateway_killed",  # and started again; the simulator has no gateway to kill
]

POLICIES: tuple[Policy, ...] = ("adaptive", "paper", "local", "remote")
PD_NAMES, PRFAAS_NAMES = ("east", "west", "mid"), ("north", "south", "far")
# Tokens of prompts: the shortest and the longest. In between, their logarithms are uniform.
PROMPT_TOKENS: dict[Lengths, tuple[int, int]] = {
    "short": (64, 512),
    "mixed": (64, 8000),
    "long": (2000, 8000),
}
SLOWEST = 20.0  # factor between a node's profile and what it needs, in both directions


@dataclass(frozen=True, slots=True)
class ClusterCase:
    """The present nodes of a cluster: 0 to 3 of each role."""

    name: str
    kind: Literal["pd", "prfaas"]
    prefill: int
    decode: int  # 0 in a PrfaaS cluster
    paces: tuple[float, ...] = ()  # of the stated nodes: time of a prefill over that of the profile

    @property
    def stated_prefill(self) -> int:
        return self.prefill if self.kind == "pd" else max(self.prefill, 1)

    @property
    def stated_decode(self) -> int:
        return max(self.decode, 1) if self.kind == "pd" else 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """The stated nodes: those that prefill, then those that decode."""
        count = self.stated_prefill + self.stated_decode
        return tuple(f"{self.name}-{number}" for number in range(count))

    @property
    def absent(self) -> tuple[str, ...]:
        """The stated nodes that have never been started."""
        prefill, decode = self.nodes[: self.stated_prefill], self.nodes[self.stated_prefill :]
        return (*prefill[self.prefill :], *decode[self.decode :])

    @property
    def present(self) -> tuple[str, ...]:
        """The nodes that run when the case begins."""
        return tuple(node for node in self.nodes if node not in self.absent)


@dataclass(frozen=True, slots=True)
class LinkCase:
    source: str
    target: str
    gbps: float
    rtt_ms: float


@dataclass(frozen=True, slots=True)
class DeploymentCase:
    clusters: tuple[ClusterCase, ...]  # the PD clusters first
    links: tuple[LinkCase, ...]
    measured: bool  # False: the profiles are estimates
    gateway_per_home: bool = False  # where there are several; the simulator has one router

    @property
    def homes(self) -> tuple[ClusterCase, ...]:
        return tuple(cluster for cluster in self.clusters if cluster.kind == "pd")

    @property
    def prfaas(self) -> tuple[ClusterCase, ...]:
        return tuple(cluster for cluster in self.clusters if cluster.kind == "prfaas")

    def cluster(self, name: str) -> ClusterCase:
        return next(cluster for cluster in self.clusters if cluster.name == name)

    def cluster_of(self, node: str) -> ClusterCase:
        return self.cluster(node.rpartition("-")[0])

    def pace(self, node: str) -> float:
        cluster = self.cluster_of(node)
        return cluster.paces[cluster.nodes.index(node)] if cluster.paces else 1.0


@dataclass(frozen=True, slots=True)
class HomeTraffic:
    """The requests that arrive at one PD cluster."""

    home: str
    rate: float  # part of the rate that the home carries by its profiles
    lengths: Lengths
    reuse: float  # part of the prompts that continue an earlier one


@dataclass(frozen=True, slots=True)
class EventCase:
    kind: EventKind
    # A node, a cluster, "SOURCE>TARGET" of a link, or a home; the gateway of which home.
    what: str
    at: float  # share of the duration of the traffic
    until: float | None = None  # None: for ever
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Case:
    deployment: DeploymentCase
    traffic: tuple[HomeTraffic, ...]
    events: tuple[EventCase, ...]
    policy: Policy
    seed: int  # of everything that happens by chance in the run


def serving_homes(case: Case) -> list[str]:
    return [home.name for home in case.deployment.homes if home.present]


def link_name(link: LinkCase) -> str:
    return f"{link.source}>{link.target}"


# Strategies ---------------------------------------------------------------------------------------

_SHARES = st.integers(5, 80).map(lambda hundredths: hundredths / 100)
_PACES = st.sampled_from((1.0, 1.0, 1.0, 1.5, 0.7, 5.0, 0.2, SLOWEST, 1 / SLOWEST))
_GBPS = st.sampled_from((1.0, 0.2, 5.0, 0.05))
_RTT_MS = st.sampled_from((1.0, 0.0, 20.0, 80.0))


@st.composite
def _pd(draw: st.DrawFn, name: str, paces: st.SearchStrategy[float], *, whole: bool) -> ClusterCase:
    """`whole`: with nodes of both roles."""
    counts = st.sampled_from((1, 2, 3) if whole else (1, 2, 0, 3))
    return draw(_with_paces(ClusterCase(name, "pd", draw(counts), draw(counts)), paces))


@st.composite
def _prfaas(draw: st.DrawFn, name: str, paces: st.SearchStrategy[float]) -> ClusterCase:
    count = draw(st.sampled_from((1, 2, 0, 3)))
    return draw(_with_paces(ClusterCase(name, "prfaas", count, 0), paces))


@st.composite
def _with_paces(draw: st.DrawFn, bare: ClusterCase, paces: st.SearchStrategy[float]) -> ClusterCase:
    count = len(bare.nodes)
    return replace(bare, paces=draw(st.just((1.0,) * count) | st.tuples(*[paces] * count)))


@st.composite
def deployments(
    draw: st.DrawFn, paces: st.SearchStrategy[float] = _PACES, *, whole: bool = False
) -> DeploymentCase:
    """`whole`: every PD cluster has nodes of both roles."""
    names = PD_NAMES[: draw(st.integers(1, 3))]
    homes = [draw(_pd(name, paces, whole=whole)) for name in names]
    if not any(home.present for home in homes) and draw(st.integers(0, 9)):
        # Few cases are about deployments that can serve nothing.
        homes[0] = replace(homes[0], decode=1)
    far_names = PRFAAS_NAMES[: draw(st.integers(1, 3))]
    prfaas = [draw(_prfaas(name, paces)) for name in far_names]
    links = []
    for far in prfaas:
        # At least one link leads away from each PrfaaS cluster.
        reached = draw(st.sets(st.sampled_from([h.name for h in homes]), min_size=1))
        for home in homes:
            if home.name in reached:
                gbps, rtt_ms = draw(_GBPS), draw(_RTT_MS)
                links.append(LinkCase(far.name, home.name, gbps, rtt_ms))
                if draw(st.booleans()):
                    links.append(LinkCase(home.name, far.name, gbps, rtt_ms))
    pairs = [(one.name, other.name) for one in homes for other in homes if one.name < other.name]
    for one, other in pairs:
        if draw(st.booleans()):
            rtt_ms = draw(_RTT_MS)
            links += [LinkCase(one, other, 1.0, rtt_ms), LinkCase(other, one, 1.0, rtt_ms)]
    measured = not draw(st.booleans())
    each = len(homes) > 1 and draw(st.booleans())
    return DeploymentCase((*homes, *prfaas), tuple(links), measured, each)


@st.composite
def _traffic(draw: st.DrawFn, home: str) -> HomeTraffic:
    return HomeTraffic(
        home,
        rate=draw(st.sampled_from((0.5, 0.9, 0.2, 1.2))),
        lengths=draw(st.sampled_from(("short", "mixed", "long"))),
        reuse=draw(st.sampled_from((0.0, 0.5, 0.9))),
    )


@st.composite
def _event(draw: st.DrawFn, deployment: DeploymentCase, *, live: bool) -> EventCase:
    clusters = deployment.clusters
    nodes = [node for cluster in clusters for node in cluster.present]
    homes = [home.name for home in deployment.homes]
    far = {cluster.name for cluster in deployment.prfaas}
    links = [link_name(one) for one in deployment.links if far & {one.source, one.target}]
    targets: dict[EventKind, list[str]] = {
        "node_lost": nodes,
        "cluster_lost": [cluster.name for cluster in clusters],
        "drained": [cluster.name for cluster in clusters],
        "slow": [node for node in nodes if deployment.pace(node) < 2],
        "link_cut": links,
        "link_thin": links,
        "flood": homes,
    }
    if live:
        targets["gateway_killed"] = homes
    kind = draw(st.sampled_from([kind for kind, what in targets.items() if what]))
    what = draw(st.sampled_from(targets[kind]))
    factors: dict[EventKind, tuple[float, ...]] = {
        "slow": (SLOWEST, 5.0),
        "link_thin": (0.1, 0.02, 0.3),
        "flood": (3.0, 2.0),
    }
    at = draw(_SHARES)
    lasts = draw(st.integers(5, 60)) / 100
    is_forever = kind != "gateway_killed" and draw(st.booleans())
    until = None if is_forever else round(at + lasts, 2)
    return EventCase(kind, what, at, until, draw(st.sampled_from(factors.get(kind, (1.0,)))))


@st.composite
def cases(draw: st.DrawFn, *, live: bool = False, events: int = 3) -> Case:
    """`live`: with what the simulator does not have. `events`: the most of them."""
    deployment = draw(deployments())
    traffic = tuple(draw(_traffic(home.name)) for home in deployment.homes)
    event = _event(deployment, live=live)
    differ = st.lists(event, max_size=events, unique_by=lambda one: (one.kind, one.what))
    happening = draw(differ)
    policy = draw(st.sampled_from(POLICIES))
    return Case(deployment, traffic, tuple(happening), policy, draw(st.integers(0, 2**32 - 1)))


@st.composite
def calm_cases(draw: st.DrawFn, *, whole: bool = True) -> Case:
    """Long prompts and no event, at nodes whose pace shows within a few of them."""
    paces = st.sampled_from((1.0, 1.0, 1.5, 0.7, 5.0, 0.2))
    deployment = draw(deployments(paces, whole=whole))
    traffic = tuple(HomeTraffic(home.name, 1.0, "long", 0.0) for home in deployment.homes)
    return Case(deployment, traffic, (), "adaptive", draw(st.integers(0, 2**32 - 1)))


# For a person -------------------------------------------------------------------------------------


def describe(case: Case) -> str:
    return "\n".join(_lines(case))


def _lines(case: Case) -> Iterator[str]:
    deployment = case.deployment
    times = "measured" if deployment.measured else "estimated"
    gateways = "one gateway per home" if deployment.gateway_per_home else "one gateway"
    yield f"policy {case.policy}, seed {case.seed}, {times} profiles, {gateways}"
    for cluster in deployment.clusters:
        present = f"{cluster.prefill} prefill"
        if cluster.kind == "pd":
            present += f", {cluster.decode} decode"
        line = f"  {cluster.name} ({cluster.kind}): {present}"
        if cluster.absent:
            line += f"; absent: {', '.join(cluster.absent)}"
        odd = [f"{node} {deployment.pace(node):g}" for node in cluster.nodes]
        if any(pace != 1 for pace in cluster.paces):
            line += f"; times of the profile: {', '.join(odd)}"
        yield line
    for link in deployment.links:
        yield f"  link {link_name(link)}: {link.gbps:g} Gbit/s, {link.rtt_ms:g} ms"
    for home in case.traffic:
        rate = f"{home.rate:g} of what it carries"
        yield f"  traffic at {home.home}: {rate}, {home.lengths} prompts, reuse {home.reuse:g}"
    for event in case.events:
        until = "for ever" if event.until is None else f"until {event.until:g}"
        factor = "" if event.factor == 1 else f" ({event.factor:g})"
        yield f"  {event.kind}{factor} {event.what}: from {event.at:g} {until}"
