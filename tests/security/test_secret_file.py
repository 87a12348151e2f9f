"""Secret files: one reader, and one error for every file that does not hold a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.errors import InputError
from prfaas.security.secret_file import MAX_KEYS, read_secrets
from prfaas.security.shared_key import SharedKey
from prfaas.security.tls import server_context
from prfaas_lab.testing.certificates import make_certificates
from tests.secret_files import write_secret


def test_every_line_is_a_key_without_the_white_space_around_it(tmp_path: Path) -> None:
    file = tmp_path / "key"
    write_secret(file, " s3cret\n\nnext \n s3cret\n")
    assert read_secrets(file) == ("s3cret", "next")


@pytest.mark.parametrize("text", ["", "\n", "two words", "ключ", "k\n" * (MAX_KEYS + 1)])
def test_a_file_without_a_key_is_one_clear_error(tmp_path: Path, text: str) -> None:
    file = tmp_path / "key"
    write_secret(file, text)
    with pytest.raises(InputError, match="does not hold a key; write a line of at least 1 "):
        read_secrets(file)
    with pytest.raises(InputError, match="at least 20 printable ASCII characters"):
        read_secrets(file, min_characters=20)


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o602, 0o666])
def test_a_file_that_every_user_can_read_or_change_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "member.key"
    write_secret(file, "0123456789abcdef\n")
    file.chmod(mode)
    with pytest.raises(InputError) as refused:
        SharedKey.read(file)
    message = str(refused.value)
    assert str(file) in message and f"mode {mode:04o}" in message
    assert f"chmod o-rwx {file}" in message


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640, 0o660])
def test_a_group_may_read_a_secret_of_an_orchestrator(tmp_path: Path, mode: int) -> None:
    target, file = tmp_path / "data", tmp_path / "member.key"
    write_secret(target, "0123456789abcdef\n")
    target.chmod(mode)
    file.symlink_to(target)  # as in the volume of a Kubernetes Secret
    assert SharedKey.read(file).sent == "0123456789abcdef"


def test_a_key_that_has_become_public_is_not_used_after_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "member.key"
    write_secret(file, "0123456789abcdef\n")
    key = SharedKey.read(file)
    file.write_text("another-key-that-everybody-sees\n")
    file.chmod(0o644)
    with pytest.raises(InputError, match="mode 0644"):
        key.reload()
    assert key.sent == "0123456789abcdef"


def test_a_private_key_of_tls_that_every_user_can_read_is_refused(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    server_context(made.ca, made.server, made.server_key)
    made.server_key.chmod(0o644)
    with pytest.raises(InputError, match="mode 0644"):
        server_context(made.ca, made.server, made.server_key)
