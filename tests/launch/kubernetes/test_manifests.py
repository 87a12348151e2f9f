"""What the manifests say, for emulated engines and for vLLM servers."""

from __future__ import annotations

import importlib
import math
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from prfaas.cli.gateway import chosen_home
from prfaas.config.gateway import DEFAULTS, GatewaySection
from prfaas.config.host import HostConfig, load_host_config
from prfaas.gateway.body_workers.pool import WORKERS, memory_bound
from prfaas.gateway.client.node_client import ANSWER_BYTES
from prfaas.http_client.connection import HELD_BYTES, READ_BYTES
from prfaas.integrations.vllm import member_access
from prfaas.launch.kubernetes import monitoring
from prfaas.launch.kubernetes.gateways import memory_bytes
from prfaas.launch.kubernetes.network_policies import FLOWS
from prfaas.launch.kubernetes.pods import BASE_BYTES, MARGIN_S, USER, quantity
from prfaas.launch.services.hosts import EngineKind
from prfaas.service.connections import MEMORY_BYTES
from tests.launch.kubernetes.pod_processes import LOADER, read_manifests
from tests.launch.kubernetes.rendered import (
    CLUSTERS,
    container,
    kustomization,
    objects,
    pod_specs,
    render,
    served_deployment,
)

VERSIONS = ("1.25", "1.28", "1.31", "1.34", "1.37")
ENGINES: tuple[EngineKind, ...] = ("emulated", "vllm", "hf")
OTHERS = {"ServiceMonitor"}  # kinds that are not Kubernetes' own
SECURITY = Path(__file__).parents[3] / "docs" / "security.md"


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> EngineKind:
    found: EngineKind = request.param
    return found


@pytest.fixture(scope="module")
def folder(engine: EngineKind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return render(tmp_path_factory.mktemp(engine), engine)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_in_five_versions(folder: Path, version: str) -> None:
    kubernetes_validate = pytest.importorskip(
        "kubernetes_validate", reason="the schemas of Kubernetes are not installed"
    )
    checked = 0
    for cluster in CLUSTERS:
        for part in ("base", "overlay"):
            for one in read_manifests(folder / cluster / part):
                if one["kind"] not in OTHERS:
                    kubernetes_validate.validate(one, version, strict=True)
                    checked += 1
    assert checked > 30


def test_a_kustomization_names_every_file(folder: Path) -> None:
    for cluster in CLUSTERS:
        base = folder / cluster / "base"
        made = kustomization(base)
        texts = {name for one in made["configMapGenerator"] for name in one["files"]}
        present = {path.name for path in base.iterdir()} - {"kustomization.yaml"}
        assert present == set(made["resources"]) | texts
        overlay = folder / cluster / "overlay"
        for one in kustomization(overlay)["secretGenerator"]:
            secret = overlay / "secrets" / one["name"]
            assert [overlay / file for file in sorted(one["files"])] == sorted(secret.iterdir())


def test_kustomize_builds_every_overlay(folder: Path, tmp_path: Path) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    copied = shutil.copytree(folder, tmp_path / "k8s")
    for cluster in CLUSTERS:
        overlay = copied / cluster / "overlay"
        _name_bases(overlay / "kustomization.yaml", kubectl)
        done = subprocess.run(
            [kubectl, "kustomize", str(overlay)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        built = list(yaml.load_all(done.stdout, Loader=LOADER))
        names = {(one["kind"], one["metadata"]["name"]) for one in built}
        assert ("StatefulSet", cluster) in names and ("Secret", "members") in names
        assert {one["metadata"].get("namespace", "prfaas") for one in built} == {"prfaas"}
        (pods,) = [one for one in built if one["kind"] == "StatefulSet"]
        volumes = {v["name"]: v for v in pods["spec"]["template"]["spec"]["volumes"]}
        assert ("ConfigMap", volumes["config"]["configMap"]["name"]) in names
        # With a hash in its name, a changed configuration replaces the pods.
        assert re.fullmatch(r"host-\w{10}", volumes["config"]["configMap"]["name"])


def _name_bases(file: Path, kubectl: str) -> None:
    """Before version 1.21 kubectl knew folders as `bases` only."""
    told = subprocess.run(
        [kubectl, "version", "--client", "--output", "json"], capture_output=True, check=False
    )
    version = yaml.safe_load(told.stdout)["clientVersion"]
    if int(version["minor"].strip("+")) > 20:
        return
    made = yaml.safe_load(file.read_text())
    made["resources"].remove("../base")
    file.write_text(yaml.safe_dump({**made, "bases": ["../base"]}))


def test_the_files_of_pods_are_read_by_their_services(folder: Path, engine: EngineKind) -> None:
    for cluster in CLUSTERS:
        config = host_config(folder, cluster)
        assert config.kvd.cluster == cluster and config.kvd.node is None
        assert config.kvd.socket == "/run/prfaas/kvd.sock"
        assert config.kvd.tls.server_name == "kvd.prfaas"
        assert config.kvd.credentials_poll_s > 0
        if engine != "vllm":
            assert config.node.kvd_socket == config.kvd.socket
            assert config.node.tls == config.kvd.tls
    for cluster in ("east", "west"):
        deployment = served_deployment(folder, cluster)
        assert chosen_home(deployment, cluster) == cluster
        assert not any(one.nodes for one in deployment.clusters)
        assert [key.tenant for key in deployment.gateway.keys] == ["acme", "test"]
        if engine != "emulated":
            assert deployment.model.config == "/models/case-study-1t/config.json"
            assert deployment.gateway.tokenizer == "/models/case-study-1t"


def host_config(folder: Path, cluster: str) -> HostConfig:
    return load_host_config(folder / cluster / "base" / "host.toml")


def test_kvds_register_with_every_gateway(folder: Path) -> None:
    inside = "https://gateway-members.prfaas.svc.cluster.local:8080"
    east, west = "https://10.9.0.1:8080", "https://gw.west.example:8443"
    assert host_config(folder, "north").kvd.gateways == [east, west]
    assert host_config(folder, "east").kvd.gateways == [inside, west]
    assert host_config(folder, "west").kvd.gateways == [east, inside]
    entries = served_deployment(folder, "east").gateways
    assert [(one.cluster, one.url) for one in entries] == [("east", east), ("west", west)]


def test_pods_name_themselves_and_their_address(folder: Path) -> None:
    kvd = container(folder, "north", "north", "kvd")
    assert "kvd.node=$(POD_NAME)" in kvd["args"]
    assert "kvd.advertise=$(POD_ADDRESS)" in kvd["args"]
    fields = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in kvd["env"]
        if "valueFrom" in one
    }
    assert fields == {"POD_NAME": "metadata.name", "POD_ADDRESS": "status.podIP"}


def test_ports_of_containers_and_services_agree(folder: Path) -> None:
    wanted = {"kvd-kv": 7400, "kvd-http": 7401, "engine-http": 8000}
    for cluster in CLUSTERS:
        spec = pod_specs(folder, cluster)[cluster]
        ports = {p["name"]: p["containerPort"] for c in spec["containers"] for p in c["ports"]}
        assert ports == wanted
        headless = objects(folder, cluster, "Service")[cluster]["spec"]
        assert headless["clusterIP"] == "None"
        assert {p["name"]: p["port"] for p in headless["ports"]} == wanted
    for name, publishes in (("gateway", False), ("gateway-members", True)):
        for part in (name, f"{name}-external"):
            service = objects(folder, "east", "Service")[part]["spec"]
            assert [p["port"] for p in service["ports"]] == [8080]
            # A gateway is ready when members have registered, which they do there.
            assert service.get("publishNotReadyAddresses", False) is publishes
    assert "gateway" not in objects(folder, "north", "Service")


def test_every_container_runs_without_root_and_cannot_write_to_its_image(folder: Path) -> None:
    seen = 0
    for cluster in CLUSTERS:
        for spec in pod_specs(folder, cluster).values():
            assert spec["securityContext"]["runAsNonRoot"] is True
            assert spec["securityContext"]["runAsUser"] == USER == 10001
            assert spec["securityContext"]["fsGroup"] == USER
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert spec["automountServiceAccountToken"] is False
            for one in spec["containers"]:
                seen += 1
                assert one["securityContext"] == {
                    "runAsNonRoot": True,
                    "readOnlyRootFilesystem": True,
                    "allowPrivilegeEscalation": False,
                    "capabilities": {"drop": ["ALL"]},
                    "seccompProfile": {"type": "RuntimeDefault"},
                }
                written = {
                    m["mountPath"] for m in one["volumeMounts"] if not m.get("readOnly", False)
                }
                assert {"/run/prfaas", "/tmp"} <= written
                assert one["resources"]["limits"]["memory"]
                assert one["resources"]["requests"]["cpu"]
                named = {v["name"] for v in spec["volumes"]}
                assert {m["name"] for m in one["volumeMounts"]} <= named
    assert seen == 2 * len(CLUSTERS) + 2
    namespace = objects(folder, "east", "Namespace")["prfaas"]
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_the_memory_of_a_gateway_is_that_of_all_its_bounds_together() -> None:
    """The terms are those of the modules that keep to them. A missing one would be found: each is
    larger than the tolerance of the rest."""
    limits = GatewaySection(max_body_mb=100.0, max_bodies_mb=3000.0, max_in_flight=10_000)
    terms = {
        "body workers": WORKERS * memory_bound(100_000_000),
        "bodies and answers": 3_000_000_000,
        "the copy of an answer that is joined": 2 * ANSWER_BYTES,
        "streams that are not read": 10_000 * 3 * (HELD_BYTES + READ_BYTES),
        "connections": 4 * 10_000 * MEMORY_BYTES,
    }
    own = memory_bytes(limits) - sum(terms.values())
    least, most = 2 * BASE_BYTES, 2 * BASE_BYTES + min(terms.values()) // 2
    assert least <= own <= most
    for name, term in terms.items():
        assert not least <= own - term <= most, f"without {name}"
    assert memory_bytes(DEFAULTS) > 10 * BASE_BYTES


def test_the_limit_of_the_gateways_pod_is_its_memory(folder: Path) -> None:
    limit = container(folder, "east", "gateway", "gateway")["resources"]["limits"]["memory"]
    assert limit == quantity(memory_bytes(served_deployment(folder, "east").gateway))


def test_only_real_engines_ask_for_gpus_and_their_nodes(folder: Path, engine: EngineKind) -> None:
    for cluster, accelerator in (("east", "h20"), ("north", "h200")):
        spec = pod_specs(folder, cluster)[cluster]
        engines = container(folder, cluster, cluster, "engine")
        kvd = container(folder, cluster, cluster, "kvd")
        assert "nvidia.com/gpu" not in kvd["resources"]["limits"]
        if engine == "emulated":
            assert "nodeSelector" not in spec and "tolerations" not in spec
            assert "nvidia.com/gpu" not in engines["resources"]["limits"]
            assert engines["image"] == kvd["image"]
        else:
            assert spec["nodeSelector"] == {"prfaas.io/accelerator": accelerator}
            assert engines["resources"]["limits"]["nvidia.com/gpu"] == "8"
            assert spec["tolerations"][0]["key"] == "nvidia.com/gpu"
            assert engines["image"].startswith("prfaas-engine:")
            claims = [v["persistentVolumeClaim"] for v in spec["volumes"] if v["name"] == "models"]
            assert claims == [{"claimName": "models", "readOnly": True}]


def test_vllm_servers_have_our_connector_and_all_gpus(folder: Path, engine: EngineKind) -> None:
    if engine != "vllm":
        return
    made = container(folder, "east", "east", "engine")
    assert made["command"] == ["vllm"]
    assert made["args"][:2] == ["serve", "/models/case-study-1t"]
    words = dict(zip(made["args"], made["args"][1:], strict=False))
    assert words["--tensor-parallel-size"] == "8" and words["--ssl-cert-reqs"] == "2"
    assert "--enable-ssl-refresh" in made["args"]
    module, _, name = words["--middleware"].rpartition(".")
    assert hasattr(importlib.import_module(module), name)
    given = {one["name"]: one.get("value") for one in made["env"]}
    assert given[member_access.MEMBER_KEY_FILE] == "/etc/prfaas/secrets/member.key"
    assert given[member_access.METRICS_KEY_FILE] == "/etc/prfaas/secrets/metrics.key"
    assert "VLLM_API_KEY" not in given  # it could not be replaced
    hook = made["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[hook.index("--leave-file") + 1] == given[member_access.LEAVING_FILE]
    connector = yaml.safe_load(words["--kv-transfer-config"])["kv_connector_extra_config"]
    assert connector == {"kvd": "/run/prfaas/kvd.sock", "url": "https://$(POD_ADDRESS):8000"}


def test_probes_run_in_containers_with_mutual_tls_and_over_http_at_gateways(
    folder: Path, engine: EngineKind
) -> None:
    gateway = container(folder, "east", "gateway", "gateway")
    for kind, path in (("livenessProbe", "/live"), ("readinessProbe", "/ready")):
        get = gateway[kind]["httpGet"]
        assert get == {"path": path, "port": "gateway-http", "scheme": "HTTPS"}
        for name, port in (("kvd", 7401), ("engine", 8000)):
            made = container(folder, "east", "east", name)
            word, command, url, *options = made[kind]["exec"]["command"]
            asked = "/health" if (engine, name) == ("vllm", "engine") else path
            assert (word, command, url) == ("prfaas", "probe", f"https://127.0.0.1:{port}{asked}")
            assert options[:2] == ["--tls-ca", "/etc/prfaas/secrets/ca.pem"]
    start = container(folder, "east", "east", "engine")["startupProbe"]
    least_s = 60 if engine == "emulated" else 1800  # a model is loaded
    assert start["periodSeconds"] * start["failureThreshold"] >= least_s


def test_pods_have_the_time_that_their_containers_need_to_stop(
    folder: Path, engine: EngineKind
) -> None:
    config = host_config(folder, "east")
    engine_s = config.node.timeouts.leave_s + config.node.timeouts.drain_s
    kvd_s = config.kvd.timeouts.leave_s + config.kvd.timeouts.drain_s
    pods = pod_specs(folder, "east")
    # The kvd waits for the engine, and drains after it.
    assert pods["east"]["terminationGracePeriodSeconds"] >= math.ceil(engine_s + kvd_s + MARGIN_S)
    hook = container(folder, "east", "east", "kvd")["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[-2] == "--until-gone-s" and engine_s < float(hook[-1]) < engine_s + MARGIN_S
    assert "https://127.0.0.1:8000" in hook[2]
    timeouts = served_deployment(folder, "east").gateway.timeouts
    gateway_s = timeouts.leave_s + timeouts.drain_s + 20  # docs/gateway.md
    assert pods["gateway"]["terminationGracePeriodSeconds"] > gateway_s


def test_a_rolling_update_never_has_too_few_pods(folder: Path) -> None:
    gateway = objects(folder, "east", "Deployment")["gateway"]["spec"]
    assert gateway["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    budgets = objects(folder, "east", "PodDisruptionBudget")
    assert budgets["east"]["spec"]["maxUnavailable"] == 1
    assert budgets["gateway"]["spec"]["minAvailable"] == 1
    for name, owner in (("east", "StatefulSet"), ("gateway", "Deployment")):
        selected = objects(folder, "east", owner)[name]["spec"]["selector"]
        assert budgets[name]["spec"]["selector"] == selected
    pods = objects(folder, "east", "StatefulSet")["east"]["spec"]
    assert (pods["replicas"], pods["podManagementPolicy"]) == (2, "Parallel")


def test_prometheus_scrapes_every_port_with_the_metrics_key(folder: Path) -> None:
    monitors = objects(folder, "east", "ServiceMonitor")
    scraped = {one["port"] for m in monitors.values() for one in m["spec"]["endpoints"]}
    assert scraped == {"kvd-http", "engine-http", "gateway-http"}
    services = objects(folder, "east", "Service").values()
    for monitor in monitors.values():
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        chosen = [s for s in services if wanted <= s["metadata"]["labels"].items()]
        assert len(chosen) == 1  # otherwise pods are scraped twice
        for one in monitor["spec"]["endpoints"]:
            assert (one["path"], one["scheme"]) == ("/metrics", "https")
            assert one["authorization"] == {
                "type": "Bearer",
                "credentials": {"name": "monitoring", "key": monitoring.TOKEN},
            }
            assert one["tlsConfig"]["serverName"] == "kvd.prfaas"
            assert one["port"] in {p["name"] for p in chosen[0]["spec"]["ports"]}
    token = folder / "east/overlay/secrets/monitoring" / monitoring.TOKEN
    assert token.read_text() == (folder / "keys/metrics.key").read_text().strip()
    for secret in ("members", "monitoring"):  # the pods of members cannot give orders
        assert not list((folder / "east/overlay/secrets" / secret).glob("operator*"))


# Who may talk to whom -----------------------------------------------------------------------------


def test_the_flows_are_those_of_the_table() -> None:
    """Rows of docs/security.md by number: each has its flow, with its two ends."""
    row = re.compile(r"^\| (\d) \| ([^|]+ [→↔] [^|]+) \|", re.MULTILINE)
    rows = row.findall(SECURITY.read_text(encoding="utf-8"))
    part = {"client": "client", "operator": "operator", "operator's": "client", "kvd": "member"}
    part |= {"gateway": "gateway", "node": "member", "engine": "member"}
    told = {}
    for number, path in rows:
        source, target = re.split(" [→↔] ", path)
        told[int(number)] = (part[source.split()[0]], part[target.split()[0].rstrip(",")])
    assert {flow.row for flow in FLOWS} == set(told)
    for flow in FLOWS:
        if (flow.row, flow.target) != (2, "member"):  # the row says so in another column
            assert (flow.source, flow.target) == told[flow.row]


def allowed(policy: dict[str, Any], way: str) -> set[tuple[str, int]]:
    """Ends and ports that a policy allows."""
    found = set()
    for rule in policy["spec"][way]:
        ends = rule.get("from" if way == "ingress" else "to", [{"everyone": True}])
        for end in ends:
            for port in rule["ports"]:
                found.add((_end(end), port["port"]))
    return found


def _end(end: dict[str, Any]) -> str:
    if "ipBlock" in end:
        return str(end["ipBlock"]["cidr"])
    if "podSelector" in end:
        return str(end["podSelector"]["matchLabels"]["app.kubernetes.io/component"])
    return "everyone" if "everyone" in end else yaml.safe_dump(end["namespaceSelector"]).strip()


def test_policies_allow_the_table_and_nothing_else(folder: Path) -> None:
    policies = objects(folder, "east", "NetworkPolicy")
    assert set(policies) == {"deny-all", "member", "gateway"}
    denied = policies["deny-all"]["spec"]
    assert denied["ingress"] == denied["egress"] == []
    assert denied["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prfaas"}
    peers, dns = "10.1.0.0/16", ("{}", 53)
    prometheus = "matchLabels:\n  kubernetes.io/metadata.name: monitoring"
    assert allowed(policies["member"], "ingress") == {
        *((prometheus, port) for port in (7401, 8000)),
        *((end, port) for end in ("gateway", peers) for port in (8000, 7401)),
        *((end, port) for end in ("member", peers) for port in (7400, 7401)),
    }
    anywhere = ("0.0.0.0/0", "::/0")  # a policy cannot name hosts
    west = {(end, 8443) for end in anywhere}
    assert allowed(policies["member"], "egress") == {
        dns,
        ("gateway", 8080),
        *west,
        *((end, port) for end in ("member", peers) for port in (7400, 7401)),
    }
    assert allowed(policies["gateway"], "ingress") == {("everyone", 8080)}
    assert allowed(policies["gateway"], "egress") == {
        dns,
        *west,
        *((end, port) for end in ("member", peers) for port in (8000, 7401)),
    }
    remote = objects(folder, "north", "NetworkPolicy")
    assert set(remote) == {"deny-all", "member"}
    assert {("10.9.0.1/32", 8080), *west} <= allowed(remote["member"], "egress")
    assert ("gateway", 8080) not in allowed(remote["member"], "egress")
