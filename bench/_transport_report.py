"""What `bench/transport.py` prints: medians, ratios to the peers, and the machine."""

from __future__ import annotations

import datetime
import os
import platform
import ssl
import statistics
import subprocess
from pathlib import Path
from typing import Any

from _transport_ends import Case, Speed


class Samples:
    """What the rounds of one benchmark have measured."""

    def __init__(self) -> None:
        self.runs: dict[Case, list[Speed]] = {}
        self.ssl_pair: dict[int, list[Speed]] = {}  # by the bytes per call of `send`
        self.peers: dict[str, list[float]] = {}  # GB/s

    def add_run(self, case: Case, speed: Speed) -> None:
        self.runs.setdefault(case, []).append(speed)

    def add_ssl_pair(self, speeds: dict[int, Speed]) -> None:
        for chunk_bytes, speed in speeds.items():
            self.ssl_pair.setdefault(chunk_bytes, []).append(speed)

    def add_peers(self, speeds: dict[str, float | None]) -> None:
        """None: that peer could not run."""
        for name, speed in speeds.items():
            if speed is not None:
                self.peers.setdefault(name, []).append(speed)


def report(found: Samples) -> dict[str, Any]:
    """The medians, the best of each part, and the ratios for which all parts were run."""
    best = _best(found)
    peers = {name: _median(values) for name, values in found.peers.items()}
    iperf3 = [speed for name, speed in peers.items() if name.startswith("iperf3")]
    against = {"checked": best.get("checked"), "ssl_pair": best.get("ssl_pair")}
    against["iperf3"] = max(iperf3, default=None)
    against |= {name: speed for name, speed in peers.items() if not name.startswith("iperf3")}
    wanted = [("tls", "checked"), ("small", "checked"), ("tls", "ssl_pair")]
    wanted += [(part, "iperf3") for part in ("bare", "checked")]
    wanted += [("checked", name) for name in peers if not name.startswith("iperf3")]
    names = {("small", "checked"): "small_over_large"}
    ratios = {
        names.get((part, other), f"{part}_over_{other}"): round(ours / theirs, 3)
        for part, other in wanted
        if (ours := best.get(part)) and (theirs := against[other])
    }
    result: dict[str, Any] = {
        "runs": [_run(case, speeds) for case, speeds in found.runs.items()],
        "best": {f"{name}_GBps": speed for name, speed in best.items()},
        "ratios": ratios,
    }
    if found.ssl_pair:
        result["ssl_pair"] = [
            {"send_bytes": chunk_bytes, **_medians(speeds)}
            for chunk_bytes, speeds in found.ssl_pair.items()
        ]
    if peers:
        result["peers"] = {name: {"GBps": speed} for name, speed in peers.items()}
    return result


def _best(found: Samples) -> dict[str, float]:
    """GB/s of each part with its best number of connections. Of the checked runs only those of the
    hybrid model count, whose segments the other parts send, too."""
    best: dict[str, float] = {}
    for case, speeds in found.runs.items():
        if case.name != "dense":
            best[case.part] = max(best.get(case.part, 0.0), _medians(speeds)["GBps"])
    pair = [_medians(speeds)["GBps"] for speeds in found.ssl_pair.values()]
    return {**best, "ssl_pair": max(pair)} if pair else best


def _run(case: Case, speeds: list[Speed]) -> dict[str, Any]:
    return {
        "segments": case.name,
        "segment_bytes": max(case.segments),
        "connections": case.connections,
        "checksums": case.checksums,
        "tls": case.tls,
        **_medians(speeds),
    }


def _medians(speeds: list[Speed]) -> dict[str, float]:
    return {
        "GBps": _median([speed.gigabytes_per_s for speed in speeds]),
        "cpu_s_per_GB": _median([speed.cpu_s_per_gigabyte for speed in speeds]),
    }


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def machine() -> dict[str, Any]:
    """Where and when the figures were measured, and with which versions."""
    return {
        "architecture": platform.machine(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "openssl": ssl.OPENSSL_VERSION,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _cpu_model() -> str:
    """The CPU model; the architecture where the system does not name it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        # On ARM, only `lscpu` translates the numbers of /proc/cpuinfo.
        if not any(line.startswith("model name") for line in lines):
            lscpu = subprocess.run(["lscpu"], capture_output=True, text=True, timeout=10)
            lines = lscpu.stdout.splitlines()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    named = (
        line.partition(":")[2].strip() for line in lines if line.lower().startswith("model name")
    )
    return next(named, "") or platform.machine()
