"""Compiled kernels are kept where only this user can write."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from prfaas.engine import kernel_cache
from prfaas.engine.kernel_cache import use_kernel_cache
from prfaas.errors import InputError

VARIABLES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_AUTOTUNING")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_the_default_is_a_private_folder_of_the_user(tmp_path: Path) -> None:
    folder = use_kernel_cache(None)
    assert folder == tmp_path / "cache" / "prfaas" / "kernels"
    for path in (folder, folder / "triton", folder / "inductor"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(folder / "inductor")
    assert os.environ["TRITON_CACHE_AUTOTUNING"] == "1"
    assert use_kernel_cache(None) == folder  # again, as the next start does


def test_a_configured_folder(tmp_path: Path) -> None:
    assert use_kernel_cache(str(tmp_path / "mine")) == tmp_path / "mine"
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "mine" / "triton")


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_a_configured_folder_that_others_can_write_to(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(InputError, match=r"node\.kernel_cache: other users could write"):
        use_kernel_cache(str(folder))
    assert "TRITON_CACHE_DIR" not in os.environ


def test_a_folder_that_others_can_replace(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(InputError, match="could replace it"):
        use_kernel_cache(str(tmp_path / "open" / "mine"))
    (tmp_path / "open").chmod(0o1777)  # as /tmp: only the owner of an entry can replace it
    use_kernel_cache(str(tmp_path / "open" / "mine"))


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "theirs").mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError, match="other users could write"):
        use_kernel_cache(str(tmp_path / "theirs"))


def test_a_link_to_a_folder_that_others_can_write_to(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / "open")
    with pytest.raises(InputError, match="other users could write"):
        use_kernel_cache(str(tmp_path / "link"))


def test_an_unsafe_default_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = tmp_path / "cache" / "prfaas" / "kernels"
    kept.mkdir(parents=True)
    kept.chmod(0o777)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(kernel_cache.tempfile, "tempdir", str(tmp_path / "temporary"))
    folder = use_kernel_cache(None)
    assert folder.parent == tmp_path / "temporary"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert "not kept after this process" in caplog.text


def test_a_folder_of_the_environment_stays_if_it_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", "0")
    use_kernel_cache(None)
    assert os.environ["TRITON_CACHE_DIR"] == str(tmp_path / "triton")
    assert os.environ["TRITON_CACHE_AUTOTUNING"] == "0"
    (tmp_path / "triton").chmod(0o777)
    with pytest.raises(InputError, match="TRITON_CACHE_DIR: other users"):
        use_kernel_cache(None)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"node\.kernel_cache: cannot be used"):
        use_kernel_cache(str(tmp_path / "file" / "below"))
