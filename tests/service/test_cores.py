from __future__ import annotations

import os
from pathlib import Path

import pytest

from prfaas.service.cores import cgroup_limit, usable_cores


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "150000 100000\n"}, 1.5),
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n"}, None),
        ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "200000 100000\n"}, 2.0),
        ("0::/only/on/the/host\n", {"cpu.max": "300000 100000\n"}, 3.0),
        (
            "4:cpu,cpuacct:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "50000\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            0.5,
        ),
        (
            "4:cpu:/x\n",
            {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"},
            None,
        ),
        ("4:cpuset:/x\n", {"cpu/x/cpu.max": "50000 100000\n"}, None),
        ("0::/a\n", {"a/cpu.max": "many cores\n"}, None),
        ("nonsense\n", {}, None),
    ],
)
def test_limits_of_cgroups(
    tmp_path: Path, own: str, files: dict[str, str], limit: float | None
) -> None:
    write(tmp_path, {"own": own, **files})
    assert cgroup_limit(tmp_path, tmp_path / "own") == limit


def test_a_system_without_cgroups(tmp_path: Path) -> None:
    assert cgroup_limit(tmp_path, tmp_path / "missing") is None


def test_the_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert 0 < usable_cores() <= 1
    finally:
        os.sched_setaffinity(0, before)
