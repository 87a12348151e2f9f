"""Secret files: one reader, and one error for every file that does not hold a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.errors import InputError
from prfaas.security.secret_file import MAX_KEYS, read_secrets


def test_every_line_is_a_key_without_the_white_space_around_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" s3cret\n\nnext \n s3cret\n")
    assert read_secrets(file) == ("s3cret", "next")


@pytest.mark.parametrize("text", ["", "\n", "two words", "ключ", "k\n" * (MAX_KEYS + 1)])
def test_a_file_without_a_key_is_one_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(InputError, match="does not hold a key; write a line of at least 1 "):
        read_secrets(file)
    with pytest.raises(InputError, match="at least 20 printable ASCII characters"):
        read_secrets(file, min_characters=20)
