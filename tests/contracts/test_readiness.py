from __future__ import annotations

import pytest

from prfaas.contracts.readiness import (
    GatewayReady,
    KvdReady,
    NodeReady,
    Ready,
    RelayedAddress,
    RelayReady,
    parse_readiness,
    readiness_line,
)

KVD = KvdReady("a", "/run/a.sock", "127.0.0.1:7400", "http://127.0.0.1:7401")


@pytest.mark.parametrize(
    "message",
    [
        KVD,
        NodeReady("m", "http://127.0.0.1:8000"),
        GatewayReady("m", "http://127.0.0.1:8080"),
        RelayReady([RelayedAddress("127.0.0.1:1", "127.0.0.1:2")], "1 Gbit/s"),
    ],
)
def test_an_announcement_is_one_line_that_reads_back(message: Ready) -> None:
    line = readiness_line(message)
    assert "\n" not in line
    assert parse_readiness(line, type(message)) == message


def test_the_line_of_a_kvd_is_fixed() -> None:
    assert readiness_line(KVD) == (
        '{"ready":"kvd","node":"a","socket":"/run/a.sock","data":"127.0.0.1:7400",'
        '"http":"http://127.0.0.1:7401"}'
    )


@pytest.mark.parametrize(
    "line",
    ["", "serving m at http://127.0.0.1:8000", '{"accepted": 1}', '{"ready":"kvd"}', '{"ready":'],
)
def test_other_lines_are_not_announcements(line: str) -> None:
    assert parse_readiness(line, KvdReady) is None
    assert parse_readiness(readiness_line(KVD), NodeReady) is None
