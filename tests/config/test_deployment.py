import copy
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from prfaas.config import load_deployment, parse_deployment
from prfaas.config.deployment import SchedulerSection
from prfaas.errors import InputError
from prfaas.service.bounded_site import GONE_S

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
RAW = tomllib.loads(CASE_STUDY.read_text())


def varied(path: str, value: Any) -> dict[str, Any]:
    raw: Any = copy.deepcopy(RAW)
    at = raw
    *parents, last = path.split(".")
    for part in parents:
        at = at[int(part)] if isinstance(at, list) else at.setdefault(part, {})
    key: Any = int(last) if isinstance(at, list) else last
    if value is None:
        del at[key]
    else:
        at[key] = value
    return raw


def test_the_default_policy_is_adaptive_and_the_case_study_names_the_papers() -> None:
    assert SchedulerSection().policy == "adaptive"
    assert load_deployment(CASE_STUDY).scheduler.policy == "paper"


def test_the_case_study_is_valid() -> None:
    deployment = load_deployment(CASE_STUDY)
    assert [c.instances for c in deployment.clusters] == [4, 8]
    link = deployment.link("prfaas", "pd")
    assert link is not None and link.gbps == 100


def test_set_changes_one_key() -> None:
    changed = load_deployment(CASE_STUDY, ["gateway.timeouts.queue_s=5", "scheduler.policy=local"])
    assert changed.gateway.timeouts.queue_s == 5 and changed.scheduler.policy == "local"
    with pytest.raises(InputError, match="gateway.timeouts.queue: unknown key; did you mean"):
        load_deployment(CASE_STUDY, ["gateway.timeouts.queue=5"])


def test_nodes_wait_longer_than_a_gateway_does_for_a_client_that_stalls() -> None:
    """Otherwise they would end the connection first, and take the request for lost."""
    longest = load_deployment(CASE_STUDY, ["gateway.timeouts.stall_s=150"]).gateway.timeouts
    assert longest.stall_s < GONE_S
    with pytest.raises(InputError, match=r"gateway.timeouts.stall_s: expected .* <= 150.0, got"):
        load_deployment(CASE_STUDY, ["gateway.timeouts.stall_s=181"])


def test_proxies_are_addresses_and_networks() -> None:
    changed = load_deployment(CASE_STUDY, ['gateway.proxies=["10.0.0.7", "2001:db8::/32"]'])
    assert changed.gateway.proxies == ["10.0.0.7", "2001:db8::/32"]
    for wrong in ("proxy.example.net", "10.0.0.7/16"):
        with pytest.raises(InputError, match=f"gateway.proxies.0: '{wrong}' is not an address"):
            load_deployment(CASE_STUDY, [f'gateway.proxies=["{wrong}"]'])


def test_tenants_have_sections() -> None:
    keys = 'gateway.keys=[{ key = "k", tenant = "acme" }]'
    changed = load_deployment(
        CASE_STUDY, [keys, "gateway.tenants.acme.weight=2", "gateway.tenant_default.weight=3"]
    )
    assert changed.gateway.tenants["acme"].weight == 2
    assert changed.gateway.tenant_default.weight == 3
    with pytest.raises(InputError, match="gateway.tenants.acme.wieght: unknown key; did you mean"):
        load_deployment(CASE_STUDY, [keys, "gateway.tenants.acme.wieght=2"])
    for name in ("acme", '"a b"', "x"):
        text = f"gateway.tenants={{ {name} = {{ weight = 0.0 }}, y = {{}} }}"
        at = name.strip('"')
        with pytest.raises(InputError, match=f"gateway.tenants.{at}.weight: .* > 0.0, got 0.0"):
            load_deployment(CASE_STUDY, [keys, text])
    with pytest.raises(InputError, match="gateway.tenants.acmee: no key belongs to the tenant"):
        load_deployment(CASE_STUDY, [keys, "gateway.tenants.acmee.weight=2"])


@pytest.mark.parametrize("place", ["tenants.acme", "tenant_default"])
@pytest.mark.parametrize("key", ["max_in_flight", "max_queued_tokens", "max_bodies_mb"])
def test_a_tenant_has_no_more_than_the_deployment(place: str, key: str) -> None:
    keys = 'gateway.keys=[{ key = "k", tenant = "acme" }]'
    at = f"gateway.{place}.{key}"
    with pytest.raises(InputError, match=f"{at}: 4 is above gateway.{key} = 3; lower it"):
        load_deployment(CASE_STUDY, [keys, f"gateway.{key}=3", f"{at}=4"])


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("links.0.gbps", 0, "links.0.gbps: expected `float` > 0"),
        ("links.0.gbps", -3, "links.0.gbps: expected `float` > 0"),
        ("links.0.gbps", float("nan"), "links.0.gbps: is nan; give a finite number"),
        ("links.0.gbps", float("inf"), "links.0.gbps: is inf"),
        ("links.0.gbps", "100 Gbps", "links.0.gbps: .*got '100 Gbps'; give a plain number"),
        ("links.0.gbps", 100e9, "links.0.gbps: .*unit is 10\\^9 bits per second"),
        ("links.0.rtt_ms", 1e6, "links.0.rtt_ms: .*unit is milliseconds"),
        ("links.0.mbps", 100, "links.0.mbps: unknown key; did you mean 'gbps'"),
        ("links.0.from", "nowhere", "links.0.from: no cluster is named 'nowhere'"),
        ("links.0.to", "prfaas", "clusters.0: no link leads from 'prfaas' to a pd cluster"),
        ("links.1.from", "prfaas", "links.1: a second link"),
        ("links.0", None, "clusters.0: no link leads from 'prfaas'"),
        ("clusters.1.kind", "prfaas", "clusters: no cluster has kind 'pd'"),
        (
            "clusters.1.kind",
            "pf",
            "clusters.1.kind: invalid enum value 'pf'; use one of: pd, prfaas",
        ),
        ("clusters.1.name", "prfaas", "clusters.1.name: another cluster is named 'prfaas'"),
        ("clusters.0.gpus", 4, "clusters.0.gpus: 4 GPUs are less than one instance of 8"),
        ("clusters.0.gpus", 0, "clusters.0.gpus: expected `int` >= 1"),
        ("clusters.0.gpus", 32.5, "clusters.0.gpus: expected `int`"),
        ("clusters.0.prefill", 4, "clusters.0: a prfaas cluster only prefills"),
        ("clusters.1.prefill", 3, "clusters.1: the split is incomplete"),
        ("clusters.1.gpu", 3, "clusters.1.gpu: unknown key; did you mean 'gpus'"),
        ("workload.min_tokens", 999999, "workload.min_tokens: 999999 is above max_tokens"),
        ("workload.mu", 19400, "workload.mu: .*natural logarithm"),
        ("workload.sigma", 0, "workload.sigma: expected `float` > 0"),
        ("workload.kind", "normal", "kind: .*'normal'; use one of: lognormal, mixture, trace"),
        ("workload.kind", None, "workload.kind: is missing"),
        ("workload.mean", 3, "workload.mean: unknown key"),
        ("workload.output_tokens", None, "workload.output_tokens: is missing"),
        ("slo.output_tokens_per_s", None, "slo.output_tokens_per_s: is missing"),
        ("slo.ttft_quantile", 90, "slo.ttft_quantile: expected `float` < 1"),
        ("scheduler.threshold_tokens", 200000, "threshold_tokens: 200000 is above the longest"),
        (
            "scheduler.policy",
            "best",
            "policy: .*'best'; use one of: adaptive, local, paper, remote",
        ),
        ("gateway.port", 70000, "gateway.port: expected `int` <= 65535"),
        ("model.name", None, "model.name: is missing"),
        ("model", None, "model: is missing"),
        ("slos.x", 3, "slos: unknown key; did you mean 'slo'"),
    ],
)
def test_every_mistake_names_its_key(path: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_deployment(varied(path, value), "d.toml")
    assert str(caught.value).startswith("d.toml: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (8, 0, "clusters.1.decode: the cluster has no decode instance"),
        (5, 5, "prefill 5 + decode 5 is not 64 / 8 = 8 instances"),
    ],
)
def test_a_fixed_split_must_add_up_and_decode(prefill: int, decode: int, message: str) -> None:
    raw = varied("clusters.1.prefill", prefill)
    raw["clusters"][1]["decode"] = decode
    with pytest.raises(InputError, match=re.escape(message)):
        parse_deployment(raw, "d.toml")


def test_sections_a_command_does_not_use_are_validated_too() -> None:
    raw = varied("clusters.1.nodes", [{"url": "http://h:1", "kvd_url": "http://h:2", "port": 3}])
    with pytest.raises(InputError, match="clusters.1.nodes.0.port: unknown key"):
        parse_deployment(raw, "d.toml")


def test_a_mixture_is_checked_part_by_part() -> None:
    raw = copy.deepcopy(RAW)
    part = {"weight": 1, "mu": 9, "sigma": 1, "min_tokens": 10, "max_tokens": 5}
    raw["workload"] = {"kind": "mixture", "output_tokens": 10, "components": [part]}
    with pytest.raises(InputError, match="workload.components.0.min_tokens: 10 is above"):
        parse_deployment(raw, "d.toml")


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        load_deployment(tmp_path / "none.toml")
    with pytest.raises(InputError, match="is a directory"):
        load_deployment(tmp_path)
    binary = tmp_path / "b.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not UTF-8"):
        load_deployment(binary)
    broken = tmp_path / "c.toml"
    broken.write_text("[model\n")
    with pytest.raises(InputError, match="not valid TOML.*line 1"):
        load_deployment(broken)


TWO_BY_TWO = CASE_STUDY.with_name("two_by_two.toml")


def several(*changes: tuple[str, Any]) -> dict[str, Any]:
    """The deployment of two PD clusters, `east` (0) and `west` (1), with changed keys."""
    raw: Any = tomllib.loads(TWO_BY_TWO.read_text())
    for path, value in changes:
        at = raw
        *parents, last = path.split(".")
        for part in parents:
            at = at[int(part)] if isinstance(at, list) else at[part]
        if value is None:
            del at[last]
        else:
            at[last] = value
    return raw  # type: ignore[no-any-return]


def test_pd_clusters_have_shares_and_workloads() -> None:
    deployment = load_deployment(TWO_BY_TWO)
    east, west = deployment.of_kind("pd")
    assert deployment.traffic_shares == {"east": 0.6, "west": 0.4}
    assert deployment.workload_of(east) == deployment.workload
    assert deployment.workload_of(west) == west.workload != deployment.workload


def test_without_shares_each_pd_cluster_has_the_same() -> None:
    raw = several(("clusters.0.traffic_share", None), ("clusters.1.traffic_share", None))
    assert parse_deployment(raw, "d.toml").traffic_shares == {"east": 0.5, "west": 0.5}
    assert load_deployment(CASE_STUDY).traffic_shares == {"pd": 1.0}
    rounded = several(("clusters.0.traffic_share", 0.666), ("clusters.1.traffic_share", 0.333))
    shares = parse_deployment(rounded, "d.toml").traffic_shares
    assert sum(shares.values()) == 1 and shares["east"] == pytest.approx(2 / 3)


def test_a_missing_link_is_allowed_where_another_exists() -> None:
    raw = several()
    raw["links"] = [
        link for link in raw["links"] if (link["from"], link["to"]) != ("north", "west")
    ]
    deployment = parse_deployment(raw, "d.toml")
    assert deployment.link("north", "west") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            [("clusters.1.traffic_share", 0.5)],
            r"clusters\.1\.traffic_share: the shares of the pd clusters sum to 1\.1; change them",
        ),
        (
            [("clusters.1.traffic_share", None)],
            r"clusters\.1\.traffic_share: is missing, .*; set it .*; the others leave 0\.4",
        ),
        ([("clusters.1.traffic_share", 0)], r"clusters\.1\.traffic_share: expected `float` > 0"),
        (
            [("clusters.2.traffic_share", 0.1)],
            r"clusters\.2\.traffic_share: no request arrives at a prfaas cluster; remove it",
        ),
        (
            [("clusters.3.workload", RAW["workload"])],
            r"clusters\.3\.workload: no request arrives at a prfaas cluster",
        ),
        (
            [("clusters.1.workload.min_tokens", 200_000)],
            r"clusters\.1\.workload\.min_tokens: 200000 is above max_tokens",
        ),
        (
            [("clusters.1.workload.sigmma", 1)],
            r"clusters\.1\.workload\.sigmma: unknown key; did you",
        ),
        (
            [("clusters.1.workload.kind", "normal")],
            r"clusters\.1\.workload\.kind: .*; use one of: ",
        ),
    ],
)
def test_wrong_traffic_is_named_with_its_fix(changes: list[tuple[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_deployment(several(*changes), "d.toml")


def test_the_only_pd_cluster_has_the_workload_of_the_file() -> None:
    raw = varied("clusters.1.workload", RAW["workload"])
    with pytest.raises(InputError, match=r"clusters\.1\.workload: the only pd cluster .*; write"):
        parse_deployment(raw, "d.toml")
    with pytest.raises(InputError, match=r"clusters\.1\.traffic_share: .* sum to 0\.5"):
        parse_deployment(varied("clusters.1.traffic_share", 0.5), "d.toml")


EAST = {"cluster": "east", "url": "http://10.0.0.1:8080"}
WEST = {"cluster": "west", "url": "https://[::1]:8080/"}


def test_a_gateway_for_each_pd_cluster() -> None:
    raw = several() | {"gateways": [EAST, WEST]}
    deployment = parse_deployment(raw, "d.toml")
    entry = deployment.gateway_of("west")
    assert entry is not None and (entry.cluster, entry.port) == ("west", 8080)
    assert deployment.gateway_of("north") is None
    assert parse_deployment(several(), "d.toml").gateways == []


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([EAST], "gateways: the pd cluster 'west' has no gateway.*add .*'west', or remove all"),
        (
            [EAST, {**WEST, "cluster": "north"}],
            "gateways.1.cluster: no pd cluster is named 'north'.*pd clusters are: east, west",
        ),
        ([EAST, WEST, EAST], "gateways.2.cluster: a second gateway for 'east'"),
        (
            [EAST, {**WEST, "url": "http://10.0.0.1:8080/"}],
            "gateways.1.url: another gateway has the URL",
        ),
        ([{**EAST, "url": "10.0.0.1:8080"}, WEST], "gateways.0.url: .* is not the URL of a peer"),
        ([{**EAST, "url": "http://a"}, WEST], "gateways.0.url: 'http://a' has no port"),
        ([{**EAST, "url": "http://a:1/x"}, WEST], "gateways.0.url: .* has a path"),
        ([{**EAST, "url": "http://a:99999"}, WEST], "gateways.0.url: .* is not a URL"),
        ([{**EAST, "url": "http://u:p@a:1"}, WEST], "gateways.0.url: the URL has user info"),
        ([{**EAST, "port": 1}, WEST], "gateways.0.port: unknown key"),
    ],
)
def test_wrong_gateways(entries: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_deployment(several() | {"gateways": entries}, "d.toml")


def test_a_relay_for_each_cluster_that_sends_to_a_node() -> None:
    node = {"url": "http://e:1", "kvd_url": "http://k:1"}

    def with_via(via: Any) -> dict[str, Any]:
        return several(("clusters.0.nodes", [{**node, "via": via}]))

    parse_deployment(with_via("r:1"), "d.toml")
    deployment = parse_deployment(with_via({"north": "r:1", "west": "r:2"}), "d.toml")
    assert deployment.clusters[0].nodes[0].via == {"north": "r:1", "west": "r:2"}
    for name in ("nroth", "east"):
        with pytest.raises(InputError, match=rf"nodes\.0\.via\.{name}: no other cluster is named"):
            parse_deployment(with_via({name: "r:1"}), "d.toml")
    with pytest.raises(InputError, match=r"nodes\.0\.via\.north: 'relay' is not an address"):
        parse_deployment(with_via({"north": "relay"}), "d.toml")
