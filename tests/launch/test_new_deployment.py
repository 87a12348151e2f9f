from __future__ import annotations

import re
import shlex
from pathlib import Path

import msgspec
import pytest

from prfaas.config.gateway import GatewaySection
from prfaas.config.host import load_host_config
from prfaas.errors import InputError
from prfaas.launch.new_deployment.answers import (
    Answers,
    ClusterHosts,
    Hardware,
    Ports,
    check_clusters,
    check_tenants,
    parse_cluster,
    parse_host,
    parse_per_cluster,
    place_instances,
    with_host,
)
from prfaas.launch.new_deployment.host_files import (
    gateway_section,
    host_file,
    instance_commands,
    request_command,
    summarise_host,
)

CHIP = Hardware("chip", 1)


def made(local: str, remote: str = "", **changes: object) -> Answers:
    clusters = [parse_cluster(remote, "prfaas")] if remote else []
    clusters.append(parse_cluster(local, "pd"))
    clusters = [msgspec.structs.replace(one, hardware=CHIP) for one in clusters]
    answers = Answers(
        clusters=clusters,
        instances=place_instances(clusters),
        gateway=clusters[-1].hosts[0],
        engine="hf",
        model="/models/tiny",
        name="tiny",
        tenants=["default"],
    )
    return msgspec.structs.replace(answers, **changes)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("10.0.0.1", "10.0.0.1"),
        (" KV1.Example.net ", "kv1.example.net"),
        ("[FD00:0::1]", "fd00::1"),
        ("fd00::1", "fd00::1"),
        ("localhost", "localhost"),
    ],
)
def test_hosts_are_names_and_addresses_of_both_kinds(text: str, host: str) -> None:
    assert parse_host(text, "--pd") == host


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.300", "10.0.0.1:7400", "http://kv1", "a b", "0.0.0.0", "::", "fe80::1%eth0", "-x"],
)
def test_another_text_is_not_a_host(text: str) -> None:
    with pytest.raises(InputError, match="--pd: .* is not a host; give names or addresses"):
        parse_host(text, "--pd")


def test_clusters_are_read_with_their_names() -> None:
    assert parse_cluster("near=10.0.0.1, fd00::2", "pd") == ClusterHosts(
        "near", "pd", ["10.0.0.1", "fd00::2"]
    )
    assert parse_cluster("10.0.0.1", "prfaas").name == "prfaas"
    for text, problem in (("near=", "has no host"), ("a b=10.0.0.1", "is not a cluster's name")):
        with pytest.raises(InputError, match=problem):
            parse_cluster(text, "pd")


def test_values_are_for_one_cluster_or_for_all() -> None:
    clusters = [parse_cluster("near=a", "pd"), parse_cluster("far=b", "prfaas")]
    assert parse_per_cluster(["far=h200", "h20"], clusters, "--accelerator") == {
        "near": "h20",
        "far": "h200",
    }
    with pytest.raises(InputError, match="--gpus: no cluster is named 'other'; clusters are: near"):
        parse_per_cluster(["other=8"], clusters, "--gpus")


def test_one_pd_cluster_and_unique_names_are_required() -> None:
    near, far = parse_cluster("x=a", "pd"), parse_cluster("x=b", "prfaas")
    with pytest.raises(InputError, match="--pd: 0 PD clusters"):
        check_clusters([far])
    with pytest.raises(InputError, match="2 clusters are named 'x'"):
        check_clusters([near, far])
    with pytest.raises(InputError, match="--tenant: 'a' is not a tenant's name, or is given twice"):
        check_tenants(["a", "a"])


def test_instances_of_one_host_have_their_own_files_and_ports() -> None:
    answers = made("pd=h,h", "far=h")
    answers.check()
    first, second, third = answers.instances
    assert [one.name for one in answers.instances] == ["far-0", "pd-0", "pd-1"]
    addresses = [
        (
            answers.data_address(one).port,
            answers.kvd_address(one).port,
            answers.node_address(one).port,
        )
        for one in (first, second, third)
    ]
    assert addresses == [(7400, 7401, 8000), (7402, 7403, 8001), (7404, 7405, 8002)]
    files = [instance_commands(answers, one)[0].command for one in answers.instances]
    assert files == [
        "prfaas kvd --config host.toml",
        "prfaas kvd --config host-2.toml",
        "prfaas kvd --config host-3.toml",
    ]
    sockets = {
        re.findall('socket = "(.*)"', host_file(answers, one))[0] for one in answers.instances
    }
    assert len(sockets) == 3


def test_ports_that_collide_are_refused_with_the_flag() -> None:
    for ports, flag in (
        (Ports(kvd_data=7401), "--kvd-http-port"),
        (Ports(node=8080), "--node-port"),
        (Ports(kvd_data=65535), "--kvd-port"),
    ):
        with pytest.raises(InputError, match=f"{flag}: .* is not free"):
            made("pd=h,h", ports=ports).check()


def test_two_hosts_never_share_a_folder() -> None:
    with pytest.raises(InputError, match="the name 'fd00--1' is that of two hosts' folders"):
        made("pd=fd00::1,fd00--1").check()


@pytest.mark.parametrize(
    ("host", "all_addresses", "listen", "kvd_advertises", "url"),
    [
        ("10.0.0.1", False, "10.0.0.1", None, "https://10.0.0.1:8000"),
        ("10.0.0.1", True, "0.0.0.0", "10.0.0.1", "https://10.0.0.1:8000"),
        ("fd00::1", False, "fd00::1", None, "https://[fd00::1]:8000"),
        ("fd00::1", True, "::", "fd00::1", "https://[fd00::1]:8000"),
        ("kv1.example.net", False, "0.0.0.0", "kv1.example.net", "https://kv1.example.net:8000"),
        ("localhost", False, "127.0.0.1", "localhost", "https://localhost:8000"),
    ],
)
def test_host_files_listen_on_the_host_and_advertise_its_name(
    host: str,
    all_addresses: bool,
    listen: str,
    kvd_advertises: str | None,
    url: str,
    tmp_path: Path,
) -> None:
    answers = made(f"pd={host}", all_addresses=all_addresses)
    (instance,) = answers.instances
    file = tmp_path / "host.toml"
    file.write_text(host_file(answers, instance))
    config = load_host_config(file)
    brackets = f"[{listen}]" if ":" in listen else listen
    assert config.kvd.listen == f"{brackets}:7400" and config.kvd.http == f"{brackets}:7401"
    assert config.kvd.advertise == kvd_advertises
    assert config.node.host == listen and config.node.port == 8000
    assert (config.node.advertise or url) == url
    assert config.kvd.gateways == [url.replace(":8000", ":8080")]
    assert config.kvd.tls == config.node.tls and config.kvd.tls.ca == str(tmp_path / "ca.pem")
    assert config.node.kvd_socket == config.kvd.socket
    assert gateway_section(answers, GatewaySection()).host == listen
    for command in instance_commands(answers, instance):
        assert re.fullmatch(r"https://(\[[0-9a-f:]+\]|[a-z0-9.]+):\d+", command.url)


def test_an_added_host_gets_the_next_name_and_keeps_the_others() -> None:
    answers = made("pd=h", "far=h,i")
    before = {one.name: answers.kvd_address(one) for one in answers.instances}
    answers, added = with_host(answers, "far", "h")
    answers, other = with_host(answers, "pd", "j")
    assert (added.name, added.nth, other.name, other.nth) == ("far-2", 2, "pd-1", 0)
    after = {one.name: answers.kvd_address(one) for one in answers.instances}
    assert {name: after[name] for name in before} == before
    copied = summarise_host(answers, "h", "deploy", [added]).copy
    assert copied == "scp -p deploy/hosts/h/host-3.toml h:prfaas/"
    assert summarise_host(answers, "j", "deploy", [other]).copy.startswith("scp -rp ")


def test_a_vllm_server_gets_tls_and_the_member_key_from_its_file() -> None:
    answers = made("pd=fd00::1", engine="vllm", model="/models/a model")
    (instance,) = answers.instances
    kvd, node = instance_commands(answers, instance)
    assert kvd.command == "prfaas kvd --config host.toml"
    assert "[node]" not in host_file(answers, instance)
    key, *words = shlex.split(node.command)
    assert key == "VLLM_API_KEY=$(head -n 1 member.key)"
    assert words[:3] == ["vllm", "serve", "/models/a model"]
    options = dict(zip(words[3::2], words[4::2], strict=False))
    assert options["--ssl-cert-reqs"] == "2" and options["--ssl-ca-certs"] == "ca.pem"
    assert options["--host"] == "fd00::1"
    connector = msgspec.json.decode(words[words.index("--kv-transfer-config") + 1])
    assert connector["kv_connector_extra_config"] == {
        "kvd": "kvd.sock",
        "url": "https://[fd00::1]:8000",
    }


def test_names_with_spaces_are_quoted_in_command_lines() -> None:
    line = request_command(made("pd=10.0.0.1"), "my deploy", text=True)
    words = shlex.split(line)
    assert "my deploy/client/ca.pem" in words
    assert "https://10.0.0.1:8080/v1/completions" in words
    assert words[-2] == "-d" and msgspec.json.decode(words[-1])["prompt"] == "Once upon a time"
