"""The parts of the gateway's limits that tenants have."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.config.gateway import GatewaySection, TenantSection
from prfaas.errors import InputError, RequestError
from prfaas.gateway.api.credentials import GatewayCredentials, TenantKey
from prfaas.gateway.api.tenants import admit
from prfaas.gateway.tenants import Tenants
from prfaas_lab.testing.clock import FakeClock

TOTAL = 1000


def tenants(
    *names: str, default: TenantSection | None = None, **sections: TenantSection
) -> Tenants:
    section = GatewaySection(
        max_in_flight=TOTAL,
        tenants=sections,
        tenant_default=default or TenantSection(),
    )
    fixed = frozenset(names)
    return Tenants(section, lambda: fixed)


def flood(found: Tenants, tenant: str) -> int:
    """Takes as much as the tenant can have."""
    taken = 0
    while True:
        try:
            found.in_flight.take(tenant)
        except RequestError as error:
            assert error.status == 429 and error.retry_after_s
            return taken
        taken += 1


def test_one_tenant_has_the_limit_of_the_deployment() -> None:
    found = tenants("only")
    assert flood(found, "only") == TOTAL
    with pytest.raises(RequestError, match="gateway.max_in_flight = 1000") as refused:
        found.in_flight.take("only")
    assert refused.value.code == "overloaded"


def test_one_of_several_tenants_has_half() -> None:
    for count in (2, 3, 10):
        found = tenants(*(f"t{index}" for index in range(count)))
        assert flood(found, "t0") == TOTAL // 2
        with pytest.raises(RequestError) as refused:
            found.in_flight.take("t0")
        message = "set gateway.tenants.t0.max_in_flight to change it"
        assert refused.value.code == "tenant_limit" and message in refused.value.message
        assert f"limit of {TOTAL // 2} (half of gateway.max_in_flight" in refused.value.message


def test_two_flooding_tenants_have_half_each() -> None:
    found = tenants("a", "b")
    assert (flood(found, "a"), flood(found, "b")) == (TOTAL // 2, TOTAL // 2)


def test_three_flooding_tenants_leave_a_fourth_its_reserved_part() -> None:
    """Half of the limit is reserved, in equal parts here: an eighth for each of four tenants."""
    found = tenants("a", "b", "c", "d")
    taken = [flood(found, name) for name in "abc"]
    assert sum(taken) == TOTAL - TOTAL // 8
    assert min(taken) >= TOTAL // 8
    assert flood(found, "d") == TOTAL // 8


@settings(max_examples=60)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.5, 1.0, 3.0, 10.0]), min_size=2),
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(1, 400), st.booleans()), max_size=60),
)
def test_a_tenant_within_its_part_is_never_refused(
    weights: dict[str, float], steps: list[tuple[str, int, bool]]
) -> None:
    """And all tenants together never exceed the deployment's limit."""
    sections = {name: TenantSection(weight=weight) for name, weight in weights.items()}
    found = tenants(*weights, **sections).in_flight
    held: dict[str, list[int]] = {name: [] for name in weights}
    for name, amount, takes in steps:
        if name not in weights:
            continue
        part = int(TOTAL / 2 * weights[name] / sum(weights.values()))
        if takes:
            used = sum(held[name])
            try:
                found.take(name, amount)
            except RequestError:
                assert used + amount > part
            else:
                held[name].append(amount)
        elif held[name]:
            found.release(name, held[name].pop())
        assert found.used(name) == sum(held[name])
        assert sum(map(sum, held.values())) <= TOTAL


def test_a_section_wins_over_the_default_and_the_default_over_half() -> None:
    found = tenants(
        "a", "b", default=TenantSection(max_in_flight=7, weight=2.0), a=TenantSection(weight=5.0)
    )
    assert (flood(found, "a"), flood(found, "b")) == (7, 7)
    assert (found.weight("a"), found.weight("b")) == (5.0, 2.0)
    with pytest.raises(RequestError, match=r"limit of 7 \(gateway.tenant_default.max_in_flight\)"):
        found.in_flight.take("a")
    found = tenants("a.b", "c", **{"a.b": TenantSection(max_in_flight=1)})
    found.in_flight.take("a.b")
    with pytest.raises(RequestError, match=r'limit of 1 \(gateway.tenants."a.b".max_in_flight\)'):
        found.in_flight.take("a.b")
    assert found.state()["a.b"]["refused"] == 1


def test_a_limit_of_one_tenant_alone_counts_too() -> None:
    found = tenants("a", a=TenantSection(max_in_flight=3))
    assert flood(found, "a") == 3


def test_tenants_that_appear_with_new_keys_have_the_defaults() -> None:
    keys = [TenantKey("1", "a")]
    credentials = GatewayCredentials(lambda: keys)
    section = GatewaySection(max_in_flight=10, tenant_default=TenantSection(weight=4.0))
    found = Tenants(section, lambda: credentials.tenants)
    assert not found.several
    found.in_flight.take("a", 8)  # in flight while the keys are read again
    keys.append(TenantKey("2", "b"))
    credentials.reload()
    assert found.several and set(found.state()) == {"a", "b"}
    assert found.weight("b") == 4.0
    with pytest.raises(RequestError, match="half of gateway.max_in_flight"):
        found.in_flight.take("a")
    found.in_flight.take("b", 2)
    found.in_flight.release("a", 8)
    found.in_flight.take("b", 3)
    # A tenant whose keys are gone keeps what it has until its requests end.
    keys.pop(0)
    credentials.reload()
    found.in_flight.take("b", 5)
    assert not found.several and found.in_flight.used("a") == 0


def test_a_gateway_without_keys_has_one_tenant() -> None:
    assert GatewayCredentials().tenants == {""}


def test_a_request_gives_back_what_it_has_taken() -> None:
    found = tenants("a", "b")
    with pytest.raises(ValueError, match="test"), admit(found, "a") as admitted:
        admitted.add_bytes(100)
        admitted.add_bytes(50)
        admitted.begin_wait(2000)
        state = found.state()["a"]
        assert (state["in_flight"], state["body_bytes"], state["queued_tokens"]) == (1, 150, 2000)
        admitted.end_wait()
        assert found.queued_tokens.used("a") == 0
        raise ValueError("test")
    state = found.state()["a"]
    assert (state["in_flight"], state["body_bytes"], state["queued_tokens"]) == (0, 0, 0)


def test_each_choice_of_each_prompt_is_in_flight() -> None:
    found = tenants("a", "b", a=TenantSection(max_in_flight=20))
    with admit(found, "a") as one, admit(found, "a") as many:
        assert one.add_sequences(1, 6, 64) == 1
        assert found.in_flight.used("a") == 7
        # Of the prompts, as many are under way at once as the tenant may have in flight.
        with pytest.raises(RequestError, match=r"26 sequences.*limit of 20") as refused:
            many.add_sequences(100, 4, 64)
        assert (refused.value.status, refused.value.code) == (429, "tenant_limit")
        assert many.add_sequences(2, 4, 64) == 2
        assert found.in_flight.used("a") == 14
    assert found.in_flight.used("a") == 0
    with admit(found, "a") as alone:
        assert alone.add_sequences(100, 3, 64) == 6
        assert found.in_flight.used("a") == 18
    with admit(found, "b") as other:
        assert other.add_sequences(256, 2, 64) == 64


def test_choices_that_a_tenant_can_never_have_are_bad_input() -> None:
    found = tenants("a", "b", a=TenantSection(max_in_flight=2))
    with admit(found, "a") as admitted:
        with pytest.raises(InputError, match=r"64 choices.*2.*gateway.tenants.a.max_in_flight") as (
            refused
        ):
            admitted.add_sequences(1, 64, 64)
        assert (refused.value.where, refused.value.fix) == ("n", "send at most 2")
        assert admitted.add_sequences(1, 2, 64) == 1


def test_each_choice_counts_the_tokens_of_its_prompt() -> None:
    clock = FakeClock()
    section = TenantSection(max_queued_tokens=1_000, max_tokens_per_minute=600)
    found = Tenants(GatewaySection(tenant_default=section), lambda: frozenset({"a", "b"}), clock)
    with admit(found, "a") as admitted:
        admitted.begin_wait(20, 64)
        assert found.queued_tokens.used("a") == 1_000, "alone, it is served"
    with pytest.raises(RequestError, match="600 prompt tokens per minute"), admit(found, "a"):
        pass
    with admit(found, "b") as admitted:
        admitted.begin_wait(20)
        assert found.queued_tokens.used("b") == 20
    with admit(found, "b"):
        pass


def test_a_prompt_longer_than_the_limit_is_served_when_it_is_alone() -> None:
    found = tenants("a", "b", a=TenantSection(max_queued_tokens=100))
    with admit(found, "a") as long, admit(found, "a") as short:
        long.begin_wait(5000)
        with pytest.raises(RequestError, match="gateway.tenants.a.max_queued_tokens"):
            short.begin_wait(1)
        long.end_wait()
        short.begin_wait(1)


def test_a_body_larger_than_the_limit_is_too_large() -> None:
    found = tenants("a", "b", a=TenantSection(max_bodies_mb=1.0))
    with admit(found, "a") as admitted:
        admitted.add_bytes(900_000)
        with pytest.raises(RequestError, match="gateway.tenants.a.max_bodies_mb") as refused:
            admitted.add_bytes(200_000)
        assert refused.value.status == 413


def test_a_tenant_may_send_so_many_tokens_per_minute() -> None:
    clock = FakeClock()
    section = GatewaySection(tenant_default=TenantSection(max_tokens_per_minute=600))
    found = Tenants(section, lambda: frozenset({"a", "b"}), clock)

    def ask(tenant: str, tokens: int, nbytes: int = 0) -> None:
        with admit(found, tenant) as admitted:
            if nbytes:
                admitted.add_bytes(nbytes)
            admitted.begin_wait(tokens)

    ask("a", 1_500)  # a long prompt is served, and goes into debt
    with pytest.raises(RequestError, match="600 prompt tokens per minute") as refused:
        ask("a", 1)
    assert refused.value.status == 429 and refused.value.code == "tenant_limit"
    assert refused.value.retry_after_s == 90 and found.state()["a"]["refused"] == 1
    assert "gateway.tenant_default.max_tokens_per_minute" in refused.value.message
    ask("b", 1)
    clock.advance(90.0)
    ask("a", 0)
    clock.advance(1_000.0)
    ask("a", 600)  # more than a minute's worth is not saved up
    ask("a", 1)
    with pytest.raises(RequestError):
        ask("a", 1)
    ask("b", 1, nbytes=8 * 601)  # also a body that has few tokens
    with pytest.raises(RequestError):
        ask("b", 1)


def test_bytes_count_once_for_the_larger_of_the_sizes_of_a_body() -> None:
    clock = FakeClock()
    section = GatewaySection(tenant_default=TenantSection(max_tokens_per_minute=6_000_000))
    found = Tenants(section, lambda: frozenset({"a"}), clock)

    def charged(*sizes: int, read: int = 0, tokens: int = 0, late: int = 0) -> float:
        clock.advance(600.0)  # the account is full
        with admit(found, "a") as admitted:
            for nbytes in sizes:
                admitted.add_bytes(nbytes)
            admitted.count_read(read)
            admitted.begin_wait(tokens)
        admitted.count_read(late)
        found.token_rates.charge("a", 6_000_000)
        with pytest.raises(RequestError) as refused:
            found.token_rates.check("a")
        return (refused.value.retry_after_s or 0) * 100_000

    assert charged(8_000_000, 8_000_000) == 2_000_000
    assert charged(8_000_000, read=8_000_000) == 1_000_000
    assert charged(8_000, read=80_000_000) == 10_000_000
    assert charged(8_000, read=80_000_000, tokens=9_000_000) == 10_000_000
    assert charged(8_000, read=80_000_000, tokens=11_000_000) == 11_000_000
    assert charged(8_000_000, late=16_000_000) == 2_000_000, "the client left before it was read"
