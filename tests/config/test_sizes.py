from __future__ import annotations

import pytest

from prfaas.config.sizes import format_bytes, parse_bytes
from prfaas.errors import InputError


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4GiB", 4 << 30), ("1.5 MB", 1_500_000), ("7", 7), ("2kib", 2048), ("1TB", 10**12)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_bytes(text, "--memory") == nbytes
    assert parse_bytes(format_bytes(nbytes), "--memory") == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", "1PiB", "1e9", "1 2"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(InputError, match="--memory: .* is not a size; write it like"):
        parse_bytes(text, "--memory")
