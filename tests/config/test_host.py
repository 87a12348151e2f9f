from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.config.host import HostConfig, KvdSection, NodeSection, load_host_config
from prfaas.errors import InputError

FILE = """
[kvd]
socket = "kvd.sock"
memory = "8GiB"
gateways = ["http://a", "http://b"]
member_key_file = "/etc/prfaas/key"
tls = { ca = "ca.pem" }
[kvd.timeouts]
grant_s = 5
[node]
engine = "emulated"
model = "case-study-1t"
emulated = { catalog = ["more.toml"], byte_scale = 0.5 }
timeouts = { drain_s = 0 }
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "host.toml"
    path.write_text(FILE)
    return path


def test_without_a_file_every_key_has_its_default() -> None:
    assert load_host_config(None) == HostConfig(KvdSection(), NodeSection())


def test_the_file_is_read_and_paths_are_relative_to_it(file: Path) -> None:
    found = load_host_config(file)
    assert (found.kvd.memory, found.kvd.gateways) == ("8GiB", ["http://a", "http://b"])
    assert (found.kvd.timeouts.grant_s, found.kvd.timeouts.dispatch_s) == (5.0, 30.0)
    assert found.kvd.socket == str(file.parent / "kvd.sock")
    assert found.kvd.tls.ca == str(file.parent / "ca.pem")
    assert found.kvd.member_key_file == "/etc/prfaas/key"
    assert found.node.model == "case-study-1t", "a name of the catalog, not a path"
    assert found.node.emulated.catalog == [str(file.parent / "more.toml")]
    assert found.node.timeouts.drain_s == 0


def test_a_checkpoint_beside_the_file_is_a_path(file: Path) -> None:
    (file.parent / "case-study-1t").mkdir()
    assert load_host_config(file).node.model == str(file.parent / "case-study-1t")


def test_the_example_is_valid() -> None:
    example = load_host_config(Path(__file__).parents[2] / "configs" / "host.toml")
    assert example.kvd.socket == example.node.kvd_socket


def test_set_wins_over_the_file_and_a_flag_over_both(file: Path) -> None:
    flags = {"kvd.memory": "2GiB", "kvd.gateways": (), "kvd.listen": None, "kvd.tls.ca": "x.pem"}
    found = load_host_config(file, ["kvd.memory=1GiB", "kvd.timeouts.grant_s = 7"], flags).kvd
    assert (found.memory, found.timeouts.grant_s, found.tls.ca) == ("2GiB", 7.0, "x.pem")
    assert found.gateways == ["http://a", "http://b"], "a flag that is absent changes nothing"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kvd.memory", "--set: 'kvd.memory' is not KEY=VALUE"),
        ("kvd.memori=1GiB", "kvd.memori: unknown key; did you mean 'memory'"),
        ("kvd.timeouts.grant_s=soon", "kvd.timeouts.grant_s: expected `float`, got 'soon'"),
        ("kvd.timeouts.grant_s=-1", "kvd.timeouts.grant_s: expected `float` > 0"),
        ("kvd.memory.size=1", "kvd.memory.size: 'memory' is not a section"),
        ("node.engine=vllm", "node.engine: invalid enum value 'vllm'; use one of: emulated, hf"),
    ],
)
def test_a_wrong_assignment_names_its_key(file: Path, text: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        load_host_config(file, [text])
    assert str(caught.value).startswith(message)


def test_a_mistake_in_the_file_names_file_key_and_fix(file: Path) -> None:
    file.write_text("[kvd]\ntimeout = 3\n")
    with pytest.raises(InputError) as caught:
        load_host_config(file)
    assert str(caught.value) == f"{file}: kvd.timeout: unknown key; did you mean 'timeouts'?"
