"""`prfaas render kubernetes` as a command."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.runner import Result

CONFIGS = Path(__file__).parents[2] / "configs"
CASE_STUDY = CONFIGS / "case_study.toml"
ADDRESS = ("--gateway-address", "pd=gw.example.net:8080")


def test_the_command_writes_every_cluster_and_shows_how_to_apply_it(
    prfaas: Callable[..., Result], tmp_path: Path
) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    folder = tmp_path / "new" / "k8s"
    words = ("render", "kubernetes", CASE_STUDY, "--out", folder, "--engine", "emulated", *ADDRESS)
    scales = ("--time-scale", "0.5", "--byte-scale", "0.002", "--output-scale", "0.02")
    result = prfaas(*words, *scales, "--instances", "pd=3")
    assert result.code == 0, result.err
    for cluster in ("prfaas", "pd"):
        assert f"apply -k {folder / cluster / 'overlay'}" in result.out
        assert (folder / cluster / "base" / "statefulset.yaml").is_file()
    assert "replicas: 3" in (folder / "pd/base/statefulset.yaml").read_text()
    assert "x 0.002" in (folder / "pd/base/catalog.toml").read_text()  # gateway and engines agree
    before = (folder / "keys/member.key").read_text().split()
    assert prfaas(*words, "--rotate-keys", "add").code == 0
    assert (folder / "keys/member.key").read_text().split()[:1] == before


def test_an_estimated_plan_is_rendered(prfaas: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    plan = CONFIGS / "qwen3.5_h200_h20.toml"
    words = ("render", "kubernetes", plan, "--out", tmp_path / "k8s", "--engine", "emulated")
    result = prfaas(*words, *ADDRESS)
    assert result.code == 0, result.err
    for cluster in ("pd", "prfaas"):
        catalog = (tmp_path / "k8s" / cluster / "base/catalog.toml").read_text()
        assert catalog.count('status = "estimated"') == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((), "--gateway-address: the gateway of 'pd' has no address; give --gateway-address pd="),
        ((*ADDRESS, "--engine", "vllm"), "--model-claim: engines and gateways read the checkpoint"),
        ((*ADDRESS, "--memory", "much"), "--memory: 'much' is not a size"),
        ((*ADDRESS, "--tenant", "a b"), "--tenant: 'a b' is not a tenant's name"),
        ((*ADDRESS, "--rotate-keys", "use"), "render the deployment first"),
        ((*ADDRESS, "--instances", "nowhere=1"), "--instances: 'nowhere=1' does not begin with"),
    ],
)
def test_what_is_missing_is_named(
    prfaas: Callable[..., Result], tmp_path: Path, words: tuple[str, ...], problem: str
) -> None:
    pytest.importorskip("yaml", reason="PyYAML is not installed")
    given = ("render", "kubernetes", CASE_STUDY, "--out", tmp_path / "k8s", "--engine", "emulated")
    result = prfaas(*given, *words)
    assert result.code == 2 and problem in result.err
