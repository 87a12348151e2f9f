from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prfaas.config.address import parse_peer_url
from prfaas.errors import InputError


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("http://127.0.0.1:7401", "http://127.0.0.1:7401"),
        ("HTTP://Host.Example:7401/", "http://host.example:7401"),
        ("https://[0:0::1]:1", "https://[::1]:1"),
        ("http://bücher.example:80", "http://xn--bcher-kva.example:80"),
        ("http://under_score:80", "http://under_score:80"),
    ],
)
def test_a_url_has_one_form(text: str, parsed: str) -> None:
    assert parse_peer_url(text, "kvd_url") == parsed == parse_peer_url(parsed, "kvd_url")


@pytest.mark.parametrize(
    "text",
    [
        *("", "h:1", "http://h", "http://h:0", "http://h:65536", "http://h:x", "http://:1"),
        *("ftp://h:1", "file:///etc/passwd", "http://h:1/v1", "http://h:1?a", "http://h:1#a"),
        *("http://h:1/?", "http://u@h:1", "http://u:p@h:1", "http://[::1:1", "http://[x]:1"),
        *("http://a b:1", "http://h:1\n", "http://a\tb:1", "http://a..b:1", "http://.a:1"),
        *(f"http://{'x' * 70}:1", f"http://{'x.' * 140}y:1", "http://h:1" + " " * 9),
        *("http://a%2e:1", "http://[::1%25eth0]:1", "http://a\\b:1", "http://\u2100:1"),
    ],
)
def test_anything_else_is_refused_with_the_field(text: str) -> None:
    with pytest.raises(InputError) as error:
        parse_peer_url(text, "kvd_url")
    assert error.value.where == "kvd_url" and len(str(error.value)) < 1000


def test_a_password_is_not_shown() -> None:
    with pytest.raises(InputError) as error:
        parse_peer_url("http://user:secret@h:1", "kvd_url")
    assert "secret" not in str(error.value)


@given(st.one_of(st.text(), st.text().map(lambda text: f"http://{text}:1")))
@example("http://\u3002:1")
def test_every_text_is_refused_or_is_the_root_of_one_server(text: str) -> None:
    try:
        parsed = parse_peer_url(text, "url")
    except InputError:
        return
    parts = urlsplit(parsed)
    assert (parts.path, parts.query, parts.fragment, parts.username) == ("", "", "", None)
    assert parts.hostname and parts.port and parsed.isascii()
    assert parse_peer_url(parsed, "url") == parsed
