"""The words stay plain, and names of test files current."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

from tests.conftest import LONGEST, TOGETHER

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "prfaas"
MOST_PRONOUNS = 20
FILES = sorted([*SOURCE.rglob("*.py"), *(ROOT / "lab").rglob("*.py")])
PRONOUN = re.compile(r"\b(nobody|whoever|somebody|everybody)\b", re.IGNORECASE)


def test_processes_are_not_people() -> None:
    places = [*FILES, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in places
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if PRONOUN.search(line)
    ]
    assert len(found) <= MOST_PRONOUNS, "\n".join(found)


def test_groups_of_test_files_name_files_that_exist() -> None:
    """Otherwise a renamed file has its servers alone, or begins late."""
    for name in chain(LONGEST, *TOGETHER):
        assert (ROOT / name.partition(":")[0]).exists(), name
