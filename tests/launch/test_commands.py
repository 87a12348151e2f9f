from __future__ import annotations

import json
import tomllib
from itertools import pairwise
from pathlib import Path

import msgspec

from prfaas.config import Deployment, load_deployment, parse_deployment
from prfaas.config.host import load_host_config
from prfaas.config.write import deployment_toml
from prfaas.contracts.readiness import (
    KvdReady,
    NodeReady,
    RelayedAddress,
    RelayReady,
    readiness_line,
)
from prfaas.launch import commands
from prfaas.launch.services.hosts import EngineSpec, list_hosts

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
FOLDER = Path("/run/x")


def deployment() -> Deployment:
    whole = load_deployment(CASE_STUDY)
    clusters = [
        msgspec.structs.replace(whole.clusters[0], gpus=8),
        msgspec.structs.replace(whole.clusters[1], gpus=16),
    ]
    return msgspec.structs.replace(whole, clusters=clusters)


KVDS = {
    name: KvdReady(name, f"/run/{name}", f"127.0.0.1:{n}", f"http://k:{n}")
    for n, name in enumerate(("prfaas-0", "pd-0", "pd-1"), start=1)
}


def flag(arguments: list[str], name: str) -> str:
    return arguments[arguments.index(name) + 1]


def keys_set(arguments: list[str]) -> list[str]:
    return [value for name, value in pairwise(arguments) if name == "--set"]


def test_a_host_for_every_instance() -> None:
    found = list_hosts(deployment())
    assert [host.name for host in found] == ["prfaas-0", "pd-0", "pd-1"]
    assert [(host.accelerator, host.gpus) for host in found[:2]] == [("h200", 8), ("h20", 8)]


def test_a_kvd_announces_its_addresses() -> None:
    host = list_hosts(deployment())[0]
    engines = EngineSpec("hf", "/m", "m", "1GiB", ssd_size="2GiB")
    command = commands.kvd_command(host, FOLDER, engines)
    assert command.name == "kvd-prfaas-0"
    assert flag(list(command.arguments), "--cluster") == "prfaas"
    assert keys_set(list(command.arguments)) == [
        "kvd.ssd_size=2GiB",
        "kvd.timeouts.drain_s=2",
        "kvd.workers=0",
    ]
    again = list(commands.kvd_command(host, FOLDER, engines, KVDS["pd-0"]).arguments)
    assert (flag(again, "--listen"), flag(again, "--http")) == ("127.0.0.1:2", "k:2")
    assert command.readiness(readiness_line(KVDS["pd-0"])) == KVDS["pd-0"]
    assert command.readiness("another line") is None


def test_engines() -> None:
    host = list_hosts(deployment())[1]
    emulated = EngineSpec("emulated", "m", "served", "1GiB", 512, [Path("c.toml")], Path("words"))
    arguments = list(commands.engine_command(host, FOLDER, KVDS["pd-0"], emulated).arguments)
    for name, value in (
        ("--engine", "emulated"), ("--accelerator", "h20"), ("--name", "served"),
        ("--kvd", "/run/x/pd-0.sock"), ("--kvd-url", "http://k:2"),
    ):  # fmt: skip
        assert flag(arguments, name) == value
    section = load_host_config(None, keys_set(arguments)).node
    assert (section.block_tokens, section.tokenizer) == (512, "words")
    assert (section.emulated.gpus, section.emulated.catalog) == (8, ["c.toml"])
    hf = list(
        commands.engine_command(
            host, FOLDER, KVDS["pd-0"], EngineSpec("hf", "/m", "m", "1")
        ).arguments
    )
    assert "--accelerator" not in hf and flag(hf, "--model") == "/m"


def test_vllm_has_our_connector_and_its_own_interpreter() -> None:
    host = list_hosts(deployment())[1]
    engines = EngineSpec("vllm", "/falcon", "falcon", "1", python=Path("/v/python"))
    command = commands.engine_command(host, FOLDER, KVDS["pd-0"], engines, port=99)
    arguments = list(command.arguments)
    assert arguments[:2] == ["--program", "/v/python"] and flag(arguments, "--port") == "99"
    transfer = json.loads(flag(arguments, "--kv-transfer-config"))
    assert transfer["kv_connector"] == "PrfaasConnector"
    assert transfer["kv_connector_extra_config"] == {
        "kvd": "/run/x/pd-0.sock",
        "url": "http://127.0.0.1:99",
    }
    assert command.readiness("INFO: Application startup complete.") == NodeReady(
        "falcon", "http://127.0.0.1:99"
    )


def test_one_relay_for_a_link_between_clusters_and_none_within() -> None:
    (relayed,) = commands.relayed_links(deployment())
    assert relayed.name == "wan-prfaas-pd" and [host.name for host in relayed.hosts] == [
        "pd-0",
        "pd-1",
    ]
    arguments = list(commands.relay_command(relayed, KVDS).arguments)
    assert (flag(arguments, "--gbps"), flag(arguments, "--rtt-ms")) == ("100", "20")
    leads_to = [arguments[n + 1] for n, word in enumerate(arguments) if word == "--to"]
    assert leads_to == ["127.0.0.1:2", "127.0.0.1:3"]
    addresses = [RelayedAddress(f"127.0.0.1:5{n}", to) for n, to in enumerate(leads_to)]
    found = commands.relay_addresses(RelayReady(addresses, "100 Gbit/s"), relayed)
    assert found == {"pd-0": "127.0.0.1:50", "pd-1": "127.0.0.1:51"}


def test_the_deployment_as_it_runs() -> None:
    urls = {name: f"http://e:{n}" for n, name in enumerate(KVDS)}
    relays = {"pd-0": {"prfaas": "r:1"}, "pd-1": {"prfaas": "r:2", "elsewhere": "r:3"}}
    running = commands.with_nodes(deployment(), urls, KVDS, relays)
    far, near = running.clusters
    assert [(n.url, n.kvd_url, n.via) for n in far.nodes] == [("http://e:0", "http://k:1", None)]
    assert [n.via for n in near.nodes] == [{"prfaas": "r:1"}, {"prfaas": "r:2"}]


def test_a_relay_for_every_link_between_clusters() -> None:
    links = commands.relayed_links(load_deployment(CASE_STUDY.with_name("two_by_two.toml")))
    assert [link.name for link in links] == [
        *("wan-north-east", "wan-north-west", "wan-south-east", "wan-south-west"),
        *("wan-east-west", "wan-west-east"),
    ]
    assert {len(link.hosts) for link in links if link.link.target == "east"} == {12}
    assert {len(link.hosts) for link in links if link.link.target == "west"} == {6}


def test_a_gateway_for_each_pd_cluster() -> None:
    two = load_deployment(CASE_STUDY.with_name("two_by_two.toml"))
    running = commands.with_gateways(two, {"east": 8081, "west": 8082})
    parse_deployment(tomllib.loads(deployment_toml(running)), "running.toml")
    entry = running.gateway_of("west")
    assert entry is not None and entry.port == 8082
    assert commands.with_gateways(running, {}).gateways == []
    command = commands.gateway_command(FOLDER / "d.toml", name="gateway-west", cluster="west")
    assert flag(list(command.arguments), "--cluster") == "west"
    assert "--cluster" not in commands.gateway_command(FOLDER / "d.toml").arguments
