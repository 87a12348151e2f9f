from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.measure.path_limit import LIMITS, PathFacts, enough_connections, find_limit
from prfaas.measure.rates import MeasuredRate

MIB = 1 << 20


def rates(
    *gbps: float, lost: int | None = 0, seconds: float = 1.0, warmed_up: bool = True
) -> tuple[MeasuredRate, ...]:
    """With 1, 2, 4, ... connections."""
    return tuple(
        MeasuredRate(1 << index, rate, lost, seconds, warmed_up) for index, rate in enumerate(gbps)
    )


# A host that does 40 Gbit/s in the clear and 8 with TLS, and a path of 1 ms with windows of 4 MiB:
# one window per round trip is 33.6 Gbit/s.
USUAL = PathFacts(
    rates=rates(10, 10, 10, 10),
    round_trip_s=0.001,
    window_bytes=4 * MIB,
    with_tls=False,
    host_clear_gbps=40.0,
    host_tls_gbps=8.0,
    bbr=True,
)
# 60 ms: one window per round trip is 0.56 Gbit/s.
FAR = replace(USUAL, round_trip_s=0.06)


@pytest.mark.parametrize(
    ("facts", "limit"),
    [
        pytest.param(USUAL, "link", id="flat and far below the host"),
        pytest.param(replace(USUAL, rates=rates(5, 9, 10, 10)), "link", id="flat at the end"),
        pytest.param(replace(USUAL, rates=rates(10, 8, 5, 3)), "link", id="slower with more"),
        pytest.param(replace(FAR, rates=rates(0.9, 0.95, 0.9, 0.95)), "link", id="long and flat"),
        pytest.param(
            replace(USUAL, with_tls=True, rates=rates(1, 1, 1, 1)), "link", id="slow link with TLS"
        ),
        pytest.param(replace(FAR, rates=rates(0.5, 1, 2, 4)), "round trip", id="a window each"),
        pytest.param(
            replace(FAR, rates=rates(0.25, 0.5, 1, 2)), "round trip", id="half a window each"
        ),
        pytest.param(
            replace(FAR, rates=rates(0.4, 0.8, 1.6, 3.2), with_tls=True),
            "round trip",
            id="a window each with TLS",
        ),
        pytest.param(
            replace(FAR, rates=rates(0.05, 0.1, 0.2, 0.4, lost=9)), "round trip", id="loss"
        ),
        pytest.param(
            replace(FAR, rates=rates(0.5, 1, 2, 4), host_clear_gbps=None),
            "round trip",
            id="a window each, host unknown",
        ),
        pytest.param(
            replace(USUAL, rates=rates(30, 35, 38, 38)), "cores", id="as fast as the host"
        ),
        pytest.param(replace(USUAL, rates=rates(60, 90)), "cores", id="faster than one host"),
        pytest.param(replace(USUAL, rates=rates(38)), "cores", id="one number, as the host"),
        pytest.param(
            replace(USUAL, with_tls=True, rates=rates(7, 7, 6, 6)), "TLS", id="as the host with TLS"
        ),
        pytest.param(
            replace(USUAL, with_tls=True, rates=rates(7, 7), host_clear_gbps=9.0),
            "cores",
            id="the host is not faster in the clear",
        ),
        pytest.param(
            replace(USUAL, with_tls=True, rates=rates(7, 7), host_clear_gbps=None),
            "cores",
            id="with TLS, the host in the clear is unknown",
        ),
        pytest.param(replace(USUAL, rates=()), "unclear", id="no rate"),
        pytest.param(replace(USUAL, rates=rates(0, 0)), "unclear", id="no byte"),
        pytest.param(replace(USUAL, rates=rates(10)), "unclear", id="one number of connections"),
        pytest.param(replace(USUAL, rates=rates(22, 22)), "unclear", id="neither near nor far"),
        pytest.param(replace(USUAL, host_clear_gbps=None), "unclear", id="flat, host unknown"),
        pytest.param(
            replace(USUAL, rates=rates(1, 2, 4, 8)), "unclear", id="a limit per connection"
        ),
        pytest.param(
            replace(FAR, rates=rates(0.5, 1, 2, 4), window_bytes=None),
            "unclear",
            id="more help, window unknown",
        ),
        pytest.param(
            replace(FAR, rates=rates(0.5, 1, 2, 4, seconds=0.1)), "unclear", id="two round trips"
        ),
        pytest.param(
            replace(FAR, rates=rates(0.5, 1, 2, 4, warmed_up=False)), "unclear", id="slow start"
        ),
        pytest.param(
            replace(USUAL, round_trip_s=1e-4, rates=rates(10, 10, warmed_up=False)),
            "link",
            id="slow start takes no time",
        ),
    ],
)
def test_which_limit_binds(facts: PathFacts, limit: str) -> None:
    found = find_limit(facts)
    assert found.limit == limit, found.reason


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (USUAL, "kvd.connections = 1 is enough"),
        (replace(USUAL, rates=rates(5, 9, 10, 10)), "kvd.connections = 4 is enough"),
        (replace(USUAL, rates=rates(10, 9, 8, 5)), "Set kvd.connections = 1, which"),
        (USUAL, "Run `prfaas doctor` on the other host, too"),
        (USUAL, "With mutual TLS, expect less: this host alone reaches 8.00 Gbit/s"),
        (replace(USUAL, rates=rates(1, 1)), "Mutual TLS would not be the limit"),
        (replace(FAR, rates=rates(10, 10, lost=2)), "net.ipv4.tcp_congestion_control = bbr"),
        (replace(FAR, rates=rates(10, 10, lost=2), bbr=False), "modprobe tcp_bbr"),
        (replace(FAR, rates=rates(0.5, 1, 2, 4)), "measure further with --connections 8,16"),
        # 40 Gbit/s x 60 ms are 300,000,000 bytes: over 8 connections, twice, in whole MiB.
        (replace(FAR, rates=rates(0.5, 1, 2, 4)), "net.ipv4.tcp_rmem to 75497472 bytes"),
        (replace(USUAL, with_tls=True, rates=rates(7, 7, 6, 6)), "more cores"),
        (replace(USUAL, host_clear_gbps=None), "without --path-only"),
        (replace(USUAL, rates=rates(10)), "--connections 1,2,4,8"),
        (replace(FAR, rates=rates(0.5, 1, 2, 4, seconds=0.1)), "one number of connections at"),
    ],
)
def test_what_to_change(facts: PathFacts, expected: str) -> None:
    advice = find_limit(facts).advice
    assert any(expected in line for line in advice), advice


def test_a_host_without_other_limits_gets_no_advice_about_them() -> None:
    facts = replace(USUAL, rates=rates(10, 10, lost=3))  # of no importance in 1 ms
    text = " ".join(find_limit(facts).advice)
    assert "bbr" not in text and "tcp_rmem" not in text


def test_a_path_with_tls_gets_no_guess_about_tls() -> None:
    text = " ".join(find_limit(replace(USUAL, with_tls=True, rates=rates(1, 1))).advice)
    assert "utual TLS" not in text


def test_the_reason_has_the_rates() -> None:
    reason = find_limit(replace(USUAL, with_tls=True, rates=rates(7, 7))).reason
    assert "7.00 Gbit/s (0.875 GB/s)" in reason
    assert "8.00 Gbit/s (1.00 GB/s) with TLS" in reason
    assert "40.00 Gbit/s (5.00 GB/s) in the clear" in reason


def test_enough_connections() -> None:
    assert enough_connections(()) is None
    assert enough_connections(rates(0, 0)) is None
    enough = enough_connections(rates(5, 9, 10, 10.2))
    assert enough is not None and enough.connections == 4


number = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
measured_rates = st.lists(
    st.builds(
        MeasuredRate,
        st.integers(1, 64),
        number,
        st.none() | st.integers(0, 1 << 40),
        number,
        st.booleans(),
    ),
    max_size=6,
).map(tuple)


@given(
    st.builds(
        PathFacts,
        rates=measured_rates,
        round_trip_s=number,
        window_bytes=st.none() | st.integers(0, 1 << 40),
        with_tls=st.booleans(),
        host_clear_gbps=st.none() | number,
        host_tls_gbps=st.none() | number,
        bbr=st.booleans(),
    )
)
def test_any_rates_have_a_known_limit(facts: PathFacts) -> None:
    found = find_limit(facts)
    assert found.limit in LIMITS
    for line in (found.reason, *found.advice):
        assert line.endswith(".")
        assert "nan" not in line
