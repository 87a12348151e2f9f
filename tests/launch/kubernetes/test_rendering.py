"""Options of a rendering, and what a second one keeps."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from cryptography import x509

from prfaas.config import load_deployment
from prfaas.config.host import KvdSection
from prfaas.errors import InputError
from prfaas.launch.kubernetes.credentials import rotate_keys
from prfaas.launch.kubernetes.dashboard import config_map, dashboard_json
from prfaas.launch.kubernetes.options import (
    RotationStep,
    check_names,
    parse_gateway_addresses,
    parse_instances,
    parse_names,
    parse_networks,
    parse_selectors,
)
from prfaas.launch.kubernetes.rendered_deployment import in_pods, render_deployment
from prfaas.launch.kubernetes.rendering import list_services
from tests.launch.kubernetes.rendered import (
    CLUSTERS,
    OPTIONS,
    TWO_BY_TWO,
    container,
    objects,
    options_for,
    plan,
    pod_specs,
    render,
)

TWO = load_deployment(TWO_BY_TWO)


def test_services_are_listed_for_every_host_and_every_gateway(tmp_path: Path) -> None:
    deployment, engines, files = in_pods(plan(tmp_path, "emulated"), OPTIONS, None)
    services = list_services(deployment, engines, OPTIONS, files)
    kinds = [one.kind for one in services]
    assert (kinds.count("kvd"), kinds.count("engine"), kinds.count("gateway")) == (6, 6, 2)
    for engine in (one for one in services if one.kind == "engine"):
        assert engine.after == (f"kvd-{engine.host}",)
        assert {"host.toml", "catalog.toml"} == set(engine.files)
    gateway = services[-1]
    assert gateway.secrets[-2:] == ("tenant-acme.key", "tenant-test.key")
    assert (gateway.live_path, gateway.ready_path) == ("/live", "/ready")


def test_only_the_owner_reads_secrets(tmp_path: Path) -> None:
    folder = render(tmp_path, "emulated")
    public = {folder / "ca.pem", folder / "client/ca.pem", folder / "operator/ca.pem"}
    keys = [p for p in folder.rglob("*") if p.suffix in (".key", ".token", ".pem")]
    assert len(keys) > 30
    for path in keys:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o644 if path in public else 0o600), path
    assert not list((folder / "north/overlay/secrets").glob("*/salt.key"))
    assert not list((folder / "north/overlay/secrets").glob("*/tenant*"))
    assert not list(folder.glob("*/overlay/**/ca.key"))


def names(certificate: Path) -> list[str]:
    found = x509.load_pem_x509_certificate(certificate.read_bytes())
    extension = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
    return [str(name.value) for name in extension.value]


def test_certificates_name_pods_and_gateways(tmp_path: Path) -> None:
    folder = render(tmp_path, "emulated", certificate_names={"west": ("api.example",)})
    members = names(folder / "east/overlay/secrets/members/cert.pem")
    assert {"*.east.prfaas.svc.cluster.local", "*.east", "kvd.prfaas", "127.0.0.1"} <= set(members)
    west = names(folder / "west/overlay/secrets/gateway/cert.pem")
    assert {
        *("gw.west.example", "api.example", "gateway", "gateway.prfaas.svc.cluster.local"),
        *("gateway-members.prfaas.svc.cluster.local", "kvd.prfaas"),
    } <= set(west)
    assert "10.9.0.1" in names(folder / "east/overlay/secrets/gateway/cert.pem")
    scraper = (folder / "east/overlay/secrets/monitoring/cert.pem").read_bytes()
    with pytest.raises(x509.ExtensionNotFound):  # no client accepts it as a server's
        x509.load_pem_x509_certificate(scraper).extensions.get_extension_for_class(
            x509.SubjectAlternativeName
        )


def test_a_certificate_that_lacks_a_name_is_issued_again(tmp_path: Path) -> None:
    folder = render(tmp_path, "emulated")
    before = contents(folder, "*/overlay/secrets/*/cert.pem")
    render(tmp_path, "emulated", certificate_names={"east": ("api.example",)})
    after = contents(folder, "*/overlay/secrets/*/cert.pem")
    changed = [name for name in after if after[name] != before[name]]
    assert changed == ["east/overlay/secrets/gateway/cert.pem"]
    assert "api.example" in names(folder / changed[0])


def contents(folder: Path, pattern: str) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.glob(pattern))}


def test_a_second_rendering_keeps_credentials_and_the_operators_files(tmp_path: Path) -> None:
    folder = render(tmp_path, "emulated")
    secrets = contents(folder, "*/overlay/secrets/*/*")
    authority = contents(folder, "ca.*") | contents(folder, "keys/*")
    mine = folder / "east/overlay/patch.yaml"
    mine.write_text("mine\n")
    stale = folder / "east/base/stale.yaml"
    stale.write_text("stale\n")
    render(tmp_path, "emulated")
    assert contents(folder, "*/overlay/secrets/*/*") == secrets
    assert mine.read_text() == "mine\n" and not stale.exists()
    render_deployment(folder, plan(tmp_path, "emulated"), options_for("emulated"), None, renew=True)
    renewed = contents(folder, "*/overlay/secrets/*/*")
    changed = {Path(name).name for name in renewed if renewed[name] != secrets[name]}
    assert changed == {"cert.pem", "key.pem"}
    assert contents(folder, "ca.*") | contents(folder, "keys/*") == authority


def test_keys_are_replaced_in_three_steps(tmp_path: Path) -> None:
    folder = render(tmp_path, "emulated")
    with pytest.raises(InputError, match="--rotate-keys: the step 'use' does not follow"):
        rotate_keys(folder, "use")
    (old,) = lines(folder, "member.key")
    steps: tuple[tuple[RotationStep, bool, int], ...]
    steps = (("add", True, 2), ("use", False, 2), ("remove", False, 1))
    for step, sent_is_old, count in steps:
        render_deployment(
            folder,
            plan(tmp_path, "emulated"),
            options_for("emulated"),
            None,
            step=step,
        )
        # The second time it would bring the old key back.
        with pytest.raises(InputError, match=f"the step '{step}' does not follow: after"):
            rotate_keys(folder, step)
        for cluster in CLUSTERS:
            found = lines(folder, "member.key", f"{cluster}/overlay/secrets/members")
            assert len(found) == count and (found[0] == old) is sent_is_old
            metrics = lines(folder, "metrics.key")
            token = folder / cluster / "overlay/secrets/monitoring/metrics.token"
            assert token.read_text() == metrics[0]
    rotate_keys(folder, "add")  # of the next rotation


def lines(folder: Path, name: str, at: str = "keys") -> list[str]:
    return (folder / at / name).read_text().split()


def test_pods_may_use_the_network_of_their_host(tmp_path: Path) -> None:
    folder = render(tmp_path, "vllm", network="host")
    spec = pod_specs(folder, "north")["north"]
    assert spec["hostNetwork"] is True and spec["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert "hostNetwork" not in pod_specs(folder, "east")["gateway"]
    enforced = objects(folder, "north", "Namespace")["prfaas"]["metadata"]["labels"]
    assert enforced["pod-security.kubernetes.io/enforce"] == "privileged"


def test_the_ssd_tier_has_a_volume_and_selectors_are_the_operators(tmp_path: Path) -> None:
    folder = render(
        tmp_path,
        "vllm",
        ssd_size="1GiB",
        node_selectors={"east": {"pool": "a"}},
        registry="r.io/x/",
    )
    kvd = container(folder, "east", "east", "kvd")
    assert {"name": "ssd", "mountPath": "/var/lib/prfaas/ssd"} in kvd["volumeMounts"]
    text = (folder / "east/base/host.toml").read_text()
    assert 'ssd = "/var/lib/prfaas/ssd"' in text and 'ssd_size = "1GiB"' in text
    assert KvdSection().memory not in text  # a default is not written
    assert pod_specs(folder, "east")["east"]["nodeSelector"] == {"pool": "a"}
    assert pod_specs(folder, "west")["west"]["nodeSelector"] == {"prfaas.io/accelerator": "h20"}
    assert "newName: r.io/x/prfaas" in (folder / "east/overlay/kustomization.yaml").read_text()


def test_without_monitoring_nothing_needs_prometheus(tmp_path: Path) -> None:
    folder = render(tmp_path, "emulated", monitoring=False)
    assert not objects(folder, "east", "ServiceMonitor")
    assert not (folder / "east/overlay/secrets/monitoring").exists()
    ingress = objects(folder, "east", "NetworkPolicy")["member"]["spec"]["ingress"]
    assert "namespaceSelector" not in str(ingress)


def test_the_dashboard_is_that_of_the_deploy_folder() -> None:
    """What it asks for is tested in tests/deploy."""
    file = Path(__file__).parents[3] / "deploy" / "grafana" / "prfaas.json"
    assert config_map(dashboard_json())["data"] == {"prfaas.json": file.read_text()}


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: parse_gateway_addresses(["east=a:1"], TWO), "the gateway of 'west' has no addr"),
        (lambda: parse_gateway_addresses(["north=a:1"], TWO), "clusters are: east, west"),
        (lambda: parse_gateway_addresses(["east=a", "west=b:1"], TWO), "is not an address"),
        (lambda: parse_selectors(["east=pool"], TWO), "'pool' is not a label"),
        (lambda: parse_instances(["east=0"], TWO), "'0' is not a number of instances"),
        (lambda: parse_names(["east=a b"], TWO), "'a b' is not a host name"),
        (lambda: parse_networks(["10.0.0.1/8"]), "--peer-network: .*host bits"),
    ],
)
def test_wrong_options_are_refused(call: object, problem: str) -> None:
    assert callable(call)
    with pytest.raises(InputError, match=problem):
        call()


def test_names_of_clusters_are_names_of_pods(tmp_path: Path) -> None:
    file = tmp_path / "d.toml"
    for name in ("East", "gateway", "a_b", "x" * 41):
        file.write_text(TWO_BY_TWO.read_text().replace('"east"', f'"{name}"'))
        with pytest.raises(InputError, match=r"clusters\.0\.name: .* of a StatefulSet"):
            check_names(load_deployment(file))
