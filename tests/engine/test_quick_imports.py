"""Bytecode of libraries that have none is kept in a folder, and compiled ahead of their imports."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prfaas.engine.quick_imports import hidden

RUN_S = 120.0
# In a process of its own, because it changes what all later imports do.
SCRIPT = """
import json, sys
from pathlib import Path
from prfaas.engine.quick_imports import kept_bytecode

sys.path.insert(0, {libraries!r})
with kept_bytecode(Path({kept!r}), ("first", "second")):
    import first, second
print(json.dumps([first.__cached__, second.__cached__, sys.pycache_prefix]))
"""


@pytest.fixture
def libraries(tmp_path: Path) -> Path:
    for name in ("first", "second"):
        (tmp_path / "libraries" / name).mkdir(parents=True)
        (tmp_path / "libraries" / name / "__init__.py").write_text(f"NAME = {name!r}\n")
    return tmp_path / "libraries"


def import_them(libraries: Path, kept: Path, **environment: str) -> tuple[list[Path], str | None]:
    """Where the imports found or left their bytecode, and Python's folder for bytecode."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(libraries=str(libraries), kept=str(kept))],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=RUN_S,
        check=True,
    )
    first, second, prefix = json.loads(done.stdout)
    return [Path(first), Path(second)], prefix


def test_bytecode_is_kept_in_the_folder_even_where_python_must_not_write_it(
    libraries: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    found, prefix = import_them(libraries, kept, PYTHONDONTWRITEBYTECODE="1")
    assert prefix == str(kept)
    assert all(path.is_relative_to(kept) and path.is_file() for path in found)
    assert not list(libraries.rglob("*.pyc"))
    before = [path.stat().st_mtime_ns for path in found]
    again, _ = import_them(libraries, kept, PYTHONDONTWRITEBYTECODE="1")
    assert again == found and [path.stat().st_mtime_ns for path in again] == before


def test_a_changed_source_is_compiled_again(libraries: Path, tmp_path: Path) -> None:
    (first, _), _ = import_them(libraries, tmp_path / "kept", PYTHONDONTWRITEBYTECODE="1")
    before = first.read_bytes()
    (libraries / "first" / "__init__.py").write_text("NAME = 'another first'\n")
    import_them(libraries, tmp_path / "kept", PYTHONDONTWRITEBYTECODE="1")
    assert first.read_bytes() != before


def test_libraries_with_bytecode_of_their_own_keep_it(libraries: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(libraries)], check=True)
    found, prefix = import_them(libraries, tmp_path / "kept")
    assert prefix is None and not (tmp_path / "kept").exists()
    assert all(path.is_relative_to(libraries) for path in found)


def test_a_folder_of_the_operator_stays_in_use(libraries: Path, tmp_path: Path) -> None:
    theirs = str(tmp_path / "theirs")
    _, prefix = import_them(libraries, tmp_path / "kept", PYTHONPYCACHEPREFIX=theirs)
    assert prefix == theirs and not (tmp_path / "kept").exists()


def test_a_hidden_library_is_not_installed_for_a_while(
    libraries: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(libraries))
    with hidden("second"):
        assert importlib.util.find_spec("second") is None
        with pytest.raises(ImportError):
            importlib.import_module("second")
    assert importlib.import_module("second").NAME == "second"
    with hidden("second"):  # it is in use, so it stays
        assert importlib.import_module("second").NAME == "second"
    monkeypatch.delitem(sys.modules, "second")
