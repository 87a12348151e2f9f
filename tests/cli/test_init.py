from __future__ import annotations

import io
import shlex
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas.catalog import Catalog
from prfaas.cli.main import cli
from prfaas.config import load_deployment
from prfaas.config.host import load_host_config
from prfaas.security.secret_file import read_secrets
from prfaas.security.tls import client_context, server_context
from prfaas.studies.problem_files import Study
from tests.cli.runner import Result
from tests.security.deployments import write_catalog

Run = Callable[..., Result]
CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Options of a deployment with emulated engines. Relative paths are below `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    return [
        *("--engine", "emulated", "--model", "toy", "--catalog", write_catalog(tmp_path)),
        *("--prfaas", "far=fd00::1", "--gbps", 10),
    ]


HOSTS = ("--pd", "pd=10.0.0.1,10.0.0.2,10.0.0.2")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def commands(summary: dict[str, Any]) -> list[tuple[Path, list[str]]]:
    return [
        (Path(host["folder"]), shlex.split(one["command"]))
        for host in summary["hosts"]
        for one in host["commands"]
    ]


def test_only_the_owner_reads_secrets_and_enters_folders(prfaas: Run, toy: list[object]) -> None:
    assert prfaas("init", "deploy", *toy, *HOSTS).code == 0
    secrets, public = set(), set()
    for path in [Path("deploy"), *Path("deploy").rglob("*")]:
        if path.is_dir():
            assert mode(path) == 0o700, path
        else:
            (secrets if mode(path) == 0o600 else public).add(path.name)
    assert secrets == {
        *("ca.key", "key.pem", "member.key", "metrics.key", "operator.key"),
        *("tenant.key", "salt.key"),
    }
    assert public == {
        *("ca.pem", "cert.pem", "host.toml", "host-2.toml", "deployment.toml", "catalog.toml"),
        "catalog-2.toml",
        "init.json",
    }


def test_each_key_is_random_and_where_it_belongs(prfaas: Run, toy: list[object]) -> None:
    assert prfaas("init", "deploy", *toy, *HOSTS, "--gateway", "10.0.0.9").code == 0
    root = Path("deploy")
    gateway = root / "hosts" / "10.0.0.9"
    keys = {
        read_secrets(gateway / name, min_characters=64)
        for name in ("member.key", "metrics.key", "operator.key", "salt.key", "tenant.key")
    }
    assert len(keys) == 5
    for name in ("10.0.0.1", "10.0.0.2", "fd00--1"):
        host = root / "hosts" / name
        for key in ("member.key", "metrics.key"):
            assert (host / key).read_bytes() == (gateway / key).read_bytes()
        # A host that is not the gateway's can give no orders.
        assert not (host / "operator.key").exists()
        # And it knows neither the tenants nor their salts.
        assert not (host / "tenant.key").exists() and not (host / "salt.key").exists()
    assert len({path.read_bytes() for path in root.glob("hosts/*/key.pem")}) == 4
    assert sorted(path.name for path in (root / "client").iterdir()) == ["ca.pem", "tenant.key"]
    # The CA's key leaves the operator's folder never.
    assert [path.parent for path in root.rglob("ca.key")] == [root]


def test_the_printed_commands_parse_and_their_files_are_complete(
    prfaas: Run, toy: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = prfaas("init", "deploy", *toy, *HOSTS, "--json").json
    found = commands(summary)
    assert len(found) == 2 * 4 + 1
    root = Path.cwd()
    for folder, (program, name, *arguments) in found:
        assert program == "prfaas"
        monkeypatch.chdir(root / folder)
        group = cli.make_context("prfaas", [name, "--help"], resilient_parsing=True)
        command = cli.get_command(group, name)
        assert command is not None
        # A command keeps the names of its help option from the first context that it sees.
        with command.make_context(name, arguments, parent=group) as context:
            file = context.params.get("config") or context.params["file"]
        if name == "gateway":
            deployment = load_deployment(file)
            section = deployment.gateway
            Study(file, "exact").problem(deployment)
            assert len(section.keys) == 1 and section.keys[0].file is not None
            read_secrets(Path(section.keys[0].file))
            assert [len(one.nodes) for one in deployment.clusters] == [1, 3]
        else:
            config = load_host_config(file)
            tls = config.kvd.tls
            files = [Path(str(path)) for path in (tls.ca, tls.cert, tls.key)]
            server_context(*files)
            client_context(*files)
            read_secrets(Path(str(config.kvd.member_key_file)))
            assert Path(config.node.emulated.catalog[0]).is_file()
    monkeypatch.chdir(root)
    text = prfaas("init", "other", *toy, *HOSTS).out
    for _, words in found:
        assert shlex.join(words) in text
    assert "--cacert other/client/ca.pem" in text and "other/client/tenant.key" in text


def test_nothing_is_overwritten_without_force(prfaas: Run, toy: list[object]) -> None:
    assert prfaas("init", "deploy", *toy, *HOSTS).code == 0
    before = {path: path.read_bytes() for path in Path("deploy").rglob("*") if path.is_file()}
    result = prfaas("init", "deploy", *toy, *HOSTS)
    assert result.code == 2 and "deploy: has a deployment already; use --force" in result.err
    assert all(path.read_bytes() == content for path, content in before.items())
    assert prfaas("init", "deploy", *toy, "--pd", "pd=10.0.0.3", "--force").code == 0
    assert {path.name for path in Path("deploy/hosts").iterdir()} == {"10.0.0.3", "fd00--1"}
    for path, content in before.items():
        if path.exists() and path.suffix in (".key", ".pem"):
            assert path.read_bytes() != content, path
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


def test_a_folder_of_something_else_is_never_replaced(prfaas: Run, toy: list[object]) -> None:
    Path("home").mkdir()
    Path("home/file").write_text("mine")
    result = prfaas("init", "home", *toy, *HOSTS, "--force")
    assert result.code == 2 and "home: exists, and is not the folder of a deployment" in result.err
    assert [path.name for path in Path("home").iterdir()] == ["file"]


def test_a_mistake_leaves_no_files(prfaas: Run, toy: list[object], tmp_path: Path) -> None:
    before = set(tmp_path.iterdir())
    for arguments, problem in (
        ((), "--pd: 0 PD clusters are given; give one, such as --pd"),
        (("--pd", "10.0.0.300"), "--pd: '10.0.0.300' is not a host"),
        ((*HOSTS, "--gateway", "a b"), "--gateway: 'a b' is not a host"),
        ((*HOSTS, "--memory", "lots"), "--memory: 'lots' is not a size"),
        ((*HOSTS, "--accelerator", "x"), "--accelerator, --gpus: the hardware of cluster 'far'"),
        ((*HOSTS, "--gpus", "none"), "--gpus: 'none' is not a number of GPUs"),
        ((*HOSTS, "--gpus", "other=1"), "--gpus: no cluster is named 'other'"),
        ((*HOSTS, "--node-port", "8080"), "--node-port: 10.0.0.1:8080 of pd-0 is not free"),
        ((*HOSTS, "--tenant", "a", "--tenant", "a"), "--tenant: 'a' is not a tenant's name"),
        ((*HOSTS, "--gbps", "0"), "--gbps, --rtt-ms: the link has no bandwidth"),
        ((*HOSTS, "--gbps", "nan"), "--gbps, --rtt-ms: the link has no bandwidth"),
        ((*HOSTS, "--gbps", "inf"), "links.0.gbps"),
        ((*HOSTS, "--name", "other"), "--catalog: no catalog has a profile of 'other'"),
        ((*HOSTS, "--plan", CASE_STUDY), "--gbps: the plan states this"),
    ):
        result = prfaas("init", "deploy", *toy, *arguments)
        assert result.code == 2 and problem in result.err, result.err
        assert result.err.count("\n") == 1
    result = prfaas("init", "deploy", "--model", "nowhere", *HOSTS)
    assert "--model: has no config.json; give a checkpoint folder" in result.err
    result = prfaas("init", "deploy", *HOSTS)
    assert "--model: is required" in result.err
    assert set(tmp_path.iterdir()) == before


def test_a_plan_gives_model_traffic_hardware_and_links(
    prfaas: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--plan", CASE_STUDY, "--engine", "emulated")
    hosts = ("--pd", "pd=10.0.0.1,10.0.0.2", "--prfaas", "prfaas=10.1.0.1")
    result = prfaas("init", "deploy", *options, *hosts)
    assert result.code == 0, result.err
    planned, made = (
        load_deployment(file) for file in (CASE_STUDY, "deploy/hosts/10.0.0.1/deployment.toml")
    )
    assert (made.workload, made.slo, made.links) == (planned.workload, planned.slo, planned.links)
    assert made.scheduler == planned.scheduler
    assert [(one.gpus, one.gpus_per_instance, one.accelerator) for one in made.clusters] == [
        (8, 8, "h200"),
        (16, 8, "h20"),
    ]
    config = load_host_config(Path("deploy/hosts/10.1.0.1/host.toml"))
    assert (config.node.emulated.accelerator, config.node.emulated.gpus) == ("h200", 8)
    assert "Planned for 0.78 requests/s: 1 prefill node and 1 decode node at pd." in result.out
    assert "Without prfaas or its link: 0.35 requests/s" in result.out
    found = prfaas("init", "deploy", *options, *hosts, "--force", "--json").json
    (lost,) = found["lost_sites"]
    assert 0 < lost["rate_rps"] < found["capacity_rps"] == pytest.approx(0.78, abs=0.005)
    missing = prfaas("init", "other", *options, "--pd", "pd=10.0.0.1")
    assert "--prfaas: the plan's cluster 'prfaas' has no hosts" in missing.err


def test_emulated_hosts_have_the_times_of_an_estimated_plan(
    prfaas: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan = CASE_STUDY.with_name("qwen3.5_h200_h20.toml")
    hosts = ("--pd", "pd=10.0.0.1,10.0.0.2", "--prfaas", "prfaas=10.1.0.1")
    result = prfaas("init", "deploy", "--plan", plan, "--engine", "emulated", *hosts)
    assert result.code == 0, result.err
    for host, place in (("10.0.0.1", ("h20", 8)), ("10.1.0.1", ("h200", 8))):
        folder = Path("deploy/hosts") / host
        emulated = load_host_config(folder / "host.toml").node.emulated
        assert (emulated.accelerator, emulated.gpus) == place
        catalog = Catalog.builtin().extended([Path(name) for name in emulated.catalog])
        record = catalog.profile("qwen3.5-397b-a17b", *place)
        assert record is not None and record.status == "estimated"
        assert bool(record.decode) == (place == ("h20", 8)), "only PD nodes decode"


def test_hardware_that_nobody_has_measured(prfaas: Run, toy: list[object]) -> None:
    del toy
    model = ("--engine", "emulated", "--model", "qwen3-4b", "--gbps", "10")
    known = prfaas("init", "deploy", *model, *HOSTS, "--accelerator", "b200", "--gpus", "1")
    assert known.code == 0, known.err
    unknown = prfaas("init", "other", *model, *HOSTS, "--accelerator", "x", "--gpus", "1")
    assert unknown.code == 2 and ".accelerator: " in unknown.err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_asked_for_what_is_missing(
    prfaas: Run, toy: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["toy", "10.0.0.1,10.0.0.2", "far=fd00::1", "", "25", ""]
    monkeypatch.setattr(sys, "stdin", Terminal("".join(f"{line}\n" for line in answers)))
    result = prfaas("init", "deploy", "--engine", "emulated", "--catalog", "toy.toml")
    assert result.code == 0, result.err
    for question in ("Model of the catalog", "Hosts of the PD cluster", "[10.0.0.1]", "[20.0]"):
        assert question in result.out
    made = load_deployment("deploy/hosts/10.0.0.1/deployment.toml")
    assert [one.name for one in made.clusters] == ["far", "pd"]
    assert (made.links[0].gbps, made.links[0].rtt_ms) == (25.0, 20.0)


def test_a_terminal_is_asked_nothing_when_all_is_given(
    prfaas: Run, toy: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(""))
    assert prfaas("init", "deploy", *toy, *HOSTS, "--rtt-ms", 1).code == 0


def test_a_host_is_added_with_a_certificate_of_the_same_ca(prfaas: Run, toy: list[object]) -> None:
    assert prfaas("init", "deploy", *toy, *HOSTS).code == 0
    ca = Path("deploy/ca.pem").read_bytes()
    old = Path("deploy/hosts/10.0.0.1/cert.pem").read_bytes()
    summary = prfaas("init", "deploy", "--add-host", "far=kv9", "--json").json
    (host,) = summary["hosts"]
    assert [one["name"] for one in host["commands"]] == ["far-1", "far-1"]
    folder = Path(host["folder"])
    assert (folder / "ca.pem").read_bytes() == ca
    server_context(*(folder / name for name in ("ca.pem", "cert.pem", "key.pem")))
    config = load_host_config(folder / "host.toml")
    assert config.kvd.cluster == "far" and config.kvd.gateways == ["https://10.0.0.1:8080"]
    assert Path(config.node.emulated.catalog[0]).is_file()
    assert Path("deploy/hosts/10.0.0.1/cert.pem").read_bytes() == old
    again = prfaas("init", "deploy", "--add-host", "pd=10.0.0.1")
    assert again.code == 0 and "prfaas node --config host-2.toml" in again.out
    assert Path("deploy/hosts/10.0.0.1/cert.pem").read_bytes() == old
    for arguments, problem in (
        (("--add-host", "other=kv9"), "--add-host: the deployment has no cluster 'other'"),
        (("--add-host", "kv9"), "--add-host: 'kv9' does not name a cluster"),
        (("--add-host", "pd=kv9", "--force"), "--force: does not go with --add-host"),
    ):
        result = prfaas("init", "deploy", *arguments)
        assert result.code == 2 and problem in result.err
    result = prfaas("init", "none", "--add-host", "pd=kv9")
    assert result.code == 2 and "none/init.json: this folder has no deployment" in result.err


def test_renewal_keeps_the_ca_and_the_keys(prfaas: Run, toy: list[object]) -> None:
    assert prfaas("init", "deploy", *toy, *HOSTS).code == 0
    before = {path: path.read_bytes() for path in Path("deploy").rglob("*") if path.is_file()}
    result = prfaas("init", "deploy", "--renew")
    assert result.code == 0 and "SIGHUP" in result.out
    changed = {path for path, content in before.items() if path.read_bytes() != content}
    assert {path.name for path in changed} == {"cert.pem", "key.pem"}
    assert len(changed) == 2 * (3 + 1)  # three hosts and the operator
    for path in changed:
        folder = path.parent
        client_context(*(folder / name for name in ("ca.pem", "cert.pem", "key.pem")))
    Path("deploy/ca.key").unlink()
    lost = prfaas("init", "deploy", "--renew")
    assert lost.code == 2 and "deploy/ca.key: cannot be read or written" in lost.err


def test_help_teaches_with_an_example(prfaas: Run) -> None:
    text = prfaas("init", "--help").out
    assert "--pd pd=10.0.0.1,10.0.0.2 --prfaas far=10.1.0.1" in text
    assert "DIR/ca.key stays with you" in text
