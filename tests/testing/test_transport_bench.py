"""What `bench/transport.py` makes of its measurements, and its peer for TLS."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from prfaas_lab.testing.certificates import make_certificates
from tests.benches import bench

transport = bench("transport")
from _transport_ends import Case, Speed  # noqa: E402
from _transport_report import Samples, machine, report  # noqa: E402
from _transport_ssl_pair import CHUNK_BYTES, ssl_pair  # noqa: E402


def case(part: str, connections: int = 1, name: str = "1T hybrid") -> Case:
    return Case(part, name, (1_000, 2_000), connections, part == "checked", part == "tls")


def samples(speeds: dict[Case, list[float]]) -> Samples:
    found = Samples()
    for one, values in speeds.items():
        for value in values:
            found.add_run(one, Speed(value, 1 / value))
    return found


def test_parts_and_connections_are_checked() -> None:
    assert transport.parse_parts("tls,small") == {"tls", "small"}
    assert transport.parse_connections("1,8") == [1, 8]
    for parse, wrong in (
        (transport.parse_parts, "tls,fast"),
        (transport.parse_parts, ""),
        (transport.parse_connections, "0"),
        (transport.parse_connections, "1,,2"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match="give"):
            parse(wrong)


def test_only_the_wanted_parts_run() -> None:
    everything = transport.parse_arguments([])
    assert everything.only == set(transport.PARTS) and everything.connections == [1, 2, 4, 8]
    chosen = transport.cases([2, 4], {"tls", "small"}, 256 << 20)
    assert [(one.part, one.connections) for one in chosen] == [
        ("tls", 2),
        ("small", 2),
        ("tls", 4),
        ("small", 4),
    ]
    assert [one.tls for one in chosen] == [True, False, True, False]


def test_ratios_are_of_medians_and_of_the_best_number_of_connections() -> None:
    found = samples(
        {
            case("bare"): [4.0, 4.0, 9.0],
            case("checked"): [1.0, 1.0, 1.0],
            case("checked", 2): [0.1, 2.0, 3.0],
            case("checked", name="dense"): [7.0],
            case("tls"): [0.5, 0.6, 0.7],
            case("small", name="small"): [1.5],
        }
    )
    for speed in (0.7, 0.8, 0.1):
        found.add_ssl_pair({65_536: Speed(speed, 2.0), 1 << 20: Speed(speed / 2, 2.0)})
    found.add_peers({"iperf3_1": 3.0, "iperf3_4": 5.0, "other": 0.5, "absent": None})
    result = report(found)
    assert result["best"] == {
        "bare_GBps": 4.0,
        "checked_GBps": 2.0,
        "tls_GBps": 0.6,
        "small_GBps": 1.5,
        "ssl_pair_GBps": 0.7,
    }
    assert result["ratios"] == {
        "tls_over_checked": 0.3,
        "small_over_large": 0.75,
        "tls_over_ssl_pair": 0.857,
        "bare_over_iperf3": 0.8,
        "checked_over_iperf3": 0.4,
        "checked_over_other": 4.0,
    }
    assert set(result["peers"]) == {"iperf3_1", "iperf3_4", "other"}


def test_a_part_that_did_not_run_has_no_ratio() -> None:
    result = report(samples({case("tls"): [0.5]}))
    assert result["best"] == {"tls_GBps": 0.5} and result["ratios"] == {}
    assert "peers" not in result and "ssl_pair" not in result


def test_the_machine_is_named() -> None:
    described = machine()
    assert all(described.values()), described
    assert set(described) >= {"architecture", "cpu", "cores", "kernel", "python", "openssl", "date"}


def test_the_ssl_pair_moves_bytes(tmp_path: Path) -> None:
    with ssl_pair(make_certificates(tmp_path), 1 << 20) as pair:
        speeds = pair.run()
    assert set(speeds) == set(CHUNK_BYTES)
    assert all(speed.gigabytes_per_s > 0 for speed in speeds.values())
