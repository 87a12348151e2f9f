"""Documents name files, functions and classes that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "prfaas"
LABORATORY = ROOT / "lab" / "prfaas_lab"
PAGES = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
# `gateway/router.py`, `gateway/router.py: Router.place` or `cache/manager.py: a, b`
MENTION = re.compile(r"`([\w./-]+\.py)(?:: ([^`]+))?`")
LINK = re.compile(r"\]\(([^)#:]+\.md)\)")


def mentions() -> Iterator[tuple[Path, str, str]]:
    for page in PAGES:
        if page.name in ("style.md", "CHANGELOG.md"):
            continue  # its table has names as they were before
        for path, names in MENTION.findall(page.read_text(encoding="utf-8")):
            yield page, path, names


def files_named(path: str) -> list[Path]:
    """The files of that path below a folder that documents write paths from."""
    roots = (SOURCE, LABORATORY, ROOT, ROOT / "tests", ROOT / "bench", ROOT / "src")
    found = [root / path for root in roots if (root / path).is_file()]
    if not found and "/" not in path:
        found = sorted([*SOURCE.rglob(path), *LABORATORY.rglob(path)])
    return found


@pytest.mark.parametrize(("page", "path", "names"), list(mentions()), ids=str)
def test_files_and_names_exist(page: Path, path: str, names: str) -> None:
    files = files_named(path)
    assert files, f"{page.name} names {path}, which does not exist"
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    for name in re.findall(r"[A-Za-z_]\w*", names.split("(")[0]):
        assert re.search(rf"\b{name}\b", text), f"{page.name}: {path} has no {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_pages_exist(page: Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).is_file(), f"{page.name} links to {target}"
