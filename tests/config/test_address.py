from __future__ import annotations

import pytest

from prfaas.config.address import Address, parse_address
from prfaas.errors import InputError


@pytest.mark.parametrize("text", ["127.0.0.1:7000", "kv1.example.net:1", "[::1]:65535"])
def test_addresses_survive_being_printed(text: str) -> None:
    assert str(parse_address(text, "--to")) == text


def test_ipv6_loses_its_brackets() -> None:
    assert parse_address("[::1]:7000", "--to") == Address("::1", 7000)


@pytest.mark.parametrize(
    "text", ["", "7000", "host", ":7000", "host:", "host:x", "host:-1", "host:65536", "::1:7000"]
)
def test_mistakes_are_named(text: str) -> None:
    with pytest.raises(InputError, match="^--to: "):
        parse_address(text, "--to", any_port=True)


def test_port_0_only_where_it_makes_sense() -> None:
    assert parse_address("host:0", "--listen", any_port=True).port == 0
    with pytest.raises(InputError, match="'0' is not a port; give 1 to 65535"):
        parse_address("host:0", "--to")


def test_a_port_of_thousands_of_digits_is_a_mistake() -> None:
    with pytest.raises(InputError, match="is not a port"):
        parse_address("host:" + "1" * 5_000, "--to")
