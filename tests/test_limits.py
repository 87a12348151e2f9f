"""Folders, classes and constructors stay small enough to read; the words stay plain."""

from __future__ import annotations

import ast
import re
from itertools import chain
from pathlib import Path

import pytest

from tests.conftest import LONGEST, TOGETHER

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "prfaas"
MOST_FILES = 16
MOST_METHODS = 20
MOST_PARAMETERS = 7
MOST_PRONOUNS = 20
README_CHARACTERS = 9_000
FILES = sorted(SOURCE.rglob("*.py"))
# A class or constructor beyond the limits has this word in a comment above it, with the reason.
EXCUSE = "limits:"
PRONOUN = re.compile(r"\b(nobody|whoever|somebody|everybody)\b", re.IGNORECASE)


def is_excused(lines: list[str], node: ast.stmt) -> bool:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    above = lines[: first - 1]
    while above and above[-1].lstrip().startswith("#"):
        if EXCUSE in above.pop():
            return True
    return False


def parameters(function: ast.FunctionDef) -> int:
    return len(function.args.args) + len(function.args.kwonlyargs) - 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_classes_are_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ClassDef):
            continue
        methods = [n for n in node.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        if len(methods) > MOST_METHODS:
            assert is_excused(lines, node), f"{node.name} has {len(methods)} methods"
        for method in methods:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                if (count := parameters(method)) > MOST_PARAMETERS:
                    assert is_excused(lines, method), f"{node.name}() takes {count} parameters"


def test_folders_are_small() -> None:
    folders = {path.parent for path in FILES} - {SOURCE / "cli"}  # cli has one file per command
    for folder in folders:
        count = len(list(folder.glob("*.py")))
        assert count <= MOST_FILES, f"{folder.relative_to(ROOT)} has {count} files"


def test_processes_are_not_people() -> None:
    places = [*FILES, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in places
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if PRONOUN.search(line)
    ]
    assert len(found) <= MOST_PRONOUNS, "\n".join(found)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8")) <= README_CHARACTERS


def test_groups_of_test_files_name_files_that_exist() -> None:
    """Otherwise a renamed file has its servers alone, or begins late."""
    for name in chain(LONGEST, *TOGETHER):
        assert (ROOT / name.partition(":")[0]).exists(), name
