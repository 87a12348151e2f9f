"""Which pd cluster a gateway serves, and its port."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from prfaas.cli.gateway import chosen_home, entry_port
from prfaas.config import load_deployment
from prfaas.config.deployment import GatewayEntry, Node
from prfaas.config.gateway import ApiKey
from prfaas.config.write import deployment_toml
from prfaas.errors import InputError
from tests.cli.runner import Result

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"
ONE = load_deployment(CASE_STUDY)
TWO = load_deployment(CASE_STUDY.with_name("two_by_two.toml"))
EACH = msgspec.structs.replace(
    TWO,
    gateways=[GatewayEntry("east", "http://a:8081"), GatewayEntry("west", "http://b:8082")],
)

NODE = Node("http://127.0.0.1:1", "http://127.0.0.1:2")
LISTED = msgspec.structs.replace(
    EACH, clusters=[msgspec.structs.replace(EACH.clusters[0], nodes=[NODE]), *EACH.clusters[1:]]
)


def test_without_entries_one_gateway_serves_all() -> None:
    assert chosen_home(ONE, None) is None and chosen_home(TWO, None) is None
    assert chosen_home(ONE, "pd") == "pd" and entry_port(ONE, "pd") is None


def test_with_entries_each_gateway_names_its_cluster_and_has_the_port_of_its_entry() -> None:
    assert chosen_home(LISTED, "west") == "west"
    assert chosen_home(EACH, "west") == "west"  # its nodes register themselves
    assert (entry_port(EACH, "east"), entry_port(EACH, "west")) == (8081, 8082)
    with pytest.raises(InputError, match="--cluster: .* this one is; give one of: east, west"):
        chosen_home(EACH, None)


def test_names_that_cannot_be_served() -> None:
    for name in ("north", "nowhere"):
        with pytest.raises(InputError, match=f"no pd cluster is named '{name}'.*east, west"):
            chosen_home(EACH, name)
    with pytest.raises(InputError, match=r"--cluster: .* must know one another; add \[\[gateways"):
        chosen_home(TWO, "east")


def test_the_command_refuses_a_cluster_that_the_file_does_not_have(
    prfaas: Callable[..., Result], tmp_path: Path
) -> None:
    file = tmp_path / "regions.toml"
    file.write_text(deployment_toml(EACH), encoding="utf-8")
    result = prfaas("gateway", file, "--cluster", "north")
    assert result.code == 2
    assert "regions.toml: --cluster: no pd cluster is named 'north'" in result.err


def test_gateways_that_know_one_another_need_a_member_key(
    prfaas: Callable[..., Result], tmp_path: Path
) -> None:
    """Without it, no gateway would hear of another's plan."""
    file = tmp_path / "regions.toml"
    file.write_text(deployment_toml(LISTED), encoding="utf-8")
    result = prfaas("gateway", file, "--cluster", "east")
    assert result.code == 2 and "gateway.member_key_file" in result.err


def test_a_console_of_a_gateway_with_tenant_keys_needs_an_operator_key(
    prfaas: Callable[..., Result], tmp_path: Path
) -> None:
    """Without it, no operator could log in."""
    section = msgspec.structs.replace(ONE.gateway, keys=[ApiKey(key="k" * 32, tenant="acme")])
    file = tmp_path / "locked.toml"
    locked = msgspec.structs.replace(ONE, gateway=section)
    file.write_text(deployment_toml(locked), encoding="utf-8")
    result = prfaas("gateway", file, "--console")
    assert result.code == 2 and "gateway.operator_key_file: the console needs" in result.err
