"""The areas of the goldens: each is a module of this package with a function `goldens`.

An area is recorded in the folder of its name, which has no other files.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from tests.goldens.canonical import Golden, Precision, differences, text_of

RECORDED = Path(__file__).parent / "recorded"
# As the folders are named; the modules have the same names.
AREAS = (
    *(
        "plans",
        "network_plans",
        "advice",
        "simulations",
        "routes",
        "estimates",
        "deployments",
        "manifests",
    ),
    *(
        "messages",
        "frames",
        "documents",
        "metrics",
        "gateway_state",
        "configuration",
        "traces",
        "help",
        "errors",
    ),
)
_SHOWN = 12  # differences of one file
COMMAND = "python -m tests.goldens --write"


def goldens(area: str) -> Iterator[Golden]:
    """What the present code makes."""
    module = importlib.import_module(f"tests.goldens.{area}")
    found: Iterator[Golden] = module.goldens()
    yield from found


def precision(area: str) -> Precision:
    module = importlib.import_module(f"tests.goldens.{area}")
    found: Precision = getattr(module, "PRECISION", Precision())
    return found


def check(area: str, folder: Path = RECORDED) -> list[str]:
    """A paragraph for each file that differs from what the present code makes."""
    problems: list[str] = []
    made: set[Path] = set()
    for golden in goldens(area):
        path = folder / area / golden.name
        made.add(path)
        if not path.is_file():
            problems.append(f"{area}/{golden.name} has not been recorded")
            continue
        found = differences(path.read_text(encoding="utf-8"), golden, precision(area))
        if found:
            shown = [f"  {line}" for line in found[:_SHOWN]]
            more = len(found) - len(shown)
            shown += [f"  and {more} more"] if more else []
            problems.append("\n".join([f"{area}/{golden.name} differs:", *shown]))
    left_over = sorted(_files(folder / area) - made)
    return problems + [
        f"{path.relative_to(folder)} is recorded, but not made now" for path in left_over
    ]


def write(area: str, folder: Path = RECORDED) -> list[str]:
    """Records the area, and returns the names of the files that have changed. A file whose
    differences are allowed stays as it is."""
    changed: list[str] = []
    made: set[Path] = set()
    for golden in goldens(area):
        path = folder / area / golden.name
        assert path not in made, f"two goldens have the name {area}/{golden.name}"
        made.add(path)
        known = path.read_text(encoding="utf-8") if path.is_file() else None
        if known is None or differences(known, golden, precision(area)):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text_of(golden, precision(area)), encoding="utf-8")
            changed.append(f"{area}/{golden.name}")
    for path in sorted(_files(folder / area) - made):
        path.unlink()
        changed.append(f"{path.relative_to(folder)} (removed)")
    return changed


def _files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if path.is_file()}
