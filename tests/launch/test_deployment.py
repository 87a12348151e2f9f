"""Two deployments in turn on the same hosts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from prfaas.config import load_deployment
from prfaas.engine.emulated.pace import Scales
from prfaas.launch.attached_process import attached_prefix
from prfaas.launch.deployment import launched_gateway, launched_hosts
from prfaas.launch.preparation import LaunchOptions, prepare_launch

CASE_STUDY = Path(__file__).parents[2] / "configs" / "case_study.toml"


@pytest.mark.slow
async def test_a_second_deployment_decides_anew_about_roles(tmp_path: Path) -> None:
    whole = load_deployment(CASE_STUDY)
    (near,) = whole.of_kind("pd")
    near = msgspec.structs.replace(near, gpus=24)
    alone = msgspec.structs.replace(whole, clusters=[near], links=[])
    small = prepare_launch(
        alone, CASE_STUDY, LaunchOptions("emulated", Scales(0.02, 0.002, 0.02)), tmp_path
    )

    async def roles(hosts: object, prefill: int) -> list[str]:
        (cluster,) = small.deployment.clusters
        cluster = msgspec.structs.replace(cluster, prefill=prefill, decode=3 - prefill)
        deployment = msgspec.structs.replace(small.deployment, clusters=[cluster])
        async with launched_gateway(hosts, deployment) as live:  # type: ignore[arg-type]
            (shown,) = (await live.state())["clusters"]
            return sorted(node["role"] for node in shown["nodes"])

    async with launched_hosts(
        small.deployment, small.engines, tmp_path, attached_prefix()
    ) as hosts:
        first, second = await roles(hosts, 2), await roles(hosts, 1)
    assert first == ["decode", "prefill", "prefill"]
    assert second == ["decode", "decode", "prefill"]
