from __future__ import annotations

import stat
from pathlib import Path

import pytest

from prfaas.errors import InputError
from prfaas.security.certificates import make_certificates


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_keys_are_private_even_where_a_public_file_was(tmp_path: Path) -> None:
    (tmp_path / "server.key").write_text("old")
    (tmp_path / "server.key").chmod(0o666)
    made = make_certificates(tmp_path, force=True)
    for key in (made.ca_key, made.server_key, made.client_key):
        assert mode(key) == 0o600
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(p.name for p in made.files)


def test_nothing_is_overwritten_without_force(tmp_path: Path) -> None:
    made = make_certificates(tmp_path)
    before = {path: path.read_bytes() for path in made.files}
    made.client.unlink()
    with pytest.raises(InputError, match="ca.pem.* exist already; use --force"):
        make_certificates(tmp_path)
    assert not made.client.exists()
    make_certificates(tmp_path, force=True)
    assert all(path.read_bytes() != before[path] for path in made.files)


@pytest.mark.parametrize("host", ["", "a b", "http://kv1", "kv1:7000", "köln.example"])
def test_a_bad_host_leaves_no_files(tmp_path: Path, host: str) -> None:
    with pytest.raises(InputError, match="not a host name or IP address"):
        make_certificates(tmp_path / "new", [host])
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="cannot be written: Not a directory"):
        make_certificates(file / "certs")
