"""Secret files: one reader, and one error for every file that does not hold a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.errors import InputError
from prfaas.security.secret_file import read_secret


def test_white_space_around_the_secret_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(" s3cret\n")
    assert read_secret(file) == "s3cret"


@pytest.mark.parametrize("text", ["", "\n", "two words", "two\nlines", "ключ"])
def test_a_file_without_a_key_is_one_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    with pytest.raises(InputError, match="does not hold a key; write one line of at least 1 "):
        read_secret(file)
    with pytest.raises(InputError, match="at least 20 printable ASCII characters"):
        read_secret(file, min_characters=20)
