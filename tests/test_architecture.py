"""Imports point down only, and never from the product to the laboratory; heavy libraries stay in
their rooms; foundations have no cycles."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Set
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "prfaas"
LABORATORY = Path(__file__).parent.parent / "lab" / "prfaas_lab"

# Rows from the bottom. A part may import parts of lower rows, and of its own row where listed.
ROWS = [
    {
        *(
            "errors",
            "clock",
            "interpreter",
            "lateness",
            "schema",
            "types",
            "contracts",
            "kvspec",
            "config",
        ),
        *("catalog", "text", "listening", "supervision", "service", "tracing"),
    },
    {"estimator", "planner", "advisor", "scheduler", "cache", "security", "device"},
    {"transport", "engine", "http_client", "wan"},
    {"gateway", "kvd", "node", "sim", "integrations", "measure", "console"},
    {"studies"},
    {"launch"},
    {"display"},
    {"demo"},
    {"cli"},
    {"__main__"},
]
WITHIN_ROW = {
    ("lateness", "clock"),
    ("supervision", "clock"),
    ("supervision", "errors"),
    ("contracts", "errors"),
    ("contracts", "types"),
    ("contracts", "kvspec"),
    ("kvspec", "errors"),
    ("config", "errors"),
    ("catalog", "errors"),
    ("catalog", "kvspec"),
    ("catalog", "config"),  # the strict TOML reader
    ("planner", "estimator"),  # profiles that nobody has measured
    ("advisor", "planner"),
    ("advisor", "estimator"),  # the error of an estimate
    ("scheduler", "planner"),
    ("node", "kvd"),  # the Unix socket's client, also for the next one
    ("integrations", "kvd"),
    ("measure", "sim"),  # the arrivals: what is offered is what is simulated
    ("gateway", "console"),  # the scene and the pages
    ("console", "sim"),  # the results that a report shows
    ("text", "errors"),
    ("text", "config"),  # the reader of files
    ("listening", "errors"),
    ("service", "errors"),
    ("listening", "config"),  # addresses
    ("tracing", "clock"),
    ("tracing", "errors"),
    ("tracing", "interpreter"),
    ("contracts", "tracing"),  # spans
}
# Library -> the only parts that may import it.
ROOMS = {
    "torch": {"device", "engine", "integrations"},
    "transformers": {"engine", "integrations"},
    "vllm": {"integrations"},
    "matplotlib": {"display"},
    "click": {"cli", "display"},
    "cryptography": {"security"},
    "rich": {"cli", "display", "demo"},
    "jinja2": {"text"},
    "yaml": {"launch"},
    "llguidance": {"engine"},
    "opentelemetry": {"tracing"},
    "joblib": {"studies"},
    "cloudpickle": {"studies"},
    "threadpoolctl": {"studies"},
    "ray": {"studies"},
    "tokenizers": {"text", "engine"},  # the engine's makes one for its own small models
}
PURE = {"estimator", "planner", "advisor", "scheduler", "cache"}
IMPURE_MODULES = {"asyncio", "socket", "time", "threading", "subprocess", "aiohttp", "zmq"}
# sim is a shell by position but drives pure code only.
SIM_MAY_USE = ROWS[0] | ROWS[1]

# The laboratory may import all of the product. These are its own rows and rooms; it imports no
# other libraries of `ROOMS`.
LAB_ROWS = [
    {"testing", "fitting", "studies", "documents", "machine"},
    {"faults"},
    {"cli"},
    {"__main__"},
]
LAB_ROOMS = {
    "click": {"cli"},
    "cloudpickle": {"studies"},  # what travels to machines that have the product alone
}


def level(part: str, rows: list[set[str]] = ROWS) -> int:
    return next(index for index, row in enumerate(rows) if part in row)


def part_of(path: Path, package: Path = SOURCE) -> str:
    first = path.relative_to(package).parts[0]
    return first.removesuffix(".py")


@functools.cache  # several tests ask about the same file
def imports(path: Path) -> tuple[str, ...]:
    found: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return tuple(found)


FILES = sorted(path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py")
LAB_FILES = sorted(path for path in LABORATORY.rglob("*.py") if path != LABORATORY / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    part = part_of(path)
    for name in imports(path):
        library, *rest = name.split(".")
        if library == "prfaas" and rest and rest[0] != part:
            target = rest[0]
            allowed = level(target) < level(part) or (part, target) in WITHIN_ROW
            assert allowed, f"{part} may not import {target}"
            assert part != "sim" or target in SIM_MAY_USE, f"sim may not import {target}"
        if library in ROOMS:
            assert part in ROOMS[library], f"{library} does not belong into {part}"
        if part in PURE:
            assert library not in IMPURE_MODULES, f"{part} is pure, yet imports {library}"


def test_the_product_never_needs_the_laboratory() -> None:
    """Who installs the wheel has no laboratory: the product neither imports a module of it nor
    starts one by its name."""
    for path in [SOURCE / "__init__.py", *FILES]:
        strings = (
            node.value
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        )
        for name in (*imports(path), *strings):
            assert name.split(".")[0] != "prfaas_lab", f"{path.relative_to(SOURCE)} needs {name}"


@pytest.mark.parametrize("path", LAB_FILES, ids=lambda path: str(path.relative_to(LABORATORY)))
def test_imports_of_the_laboratory_point_down(path: Path) -> None:
    part = part_of(path, LABORATORY)
    for name in imports(path):
        library, *rest = name.split(".")
        if library == "prfaas_lab" and rest and rest[0] != part:
            below = level(rest[0], LAB_ROWS) < level(part, LAB_ROWS)
            assert below, f"{part} may not import {rest[0]}"
        if library in ROOMS:
            assert part in LAB_ROOMS.get(library, ()), f"{library} does not belong into {part}"


def test_conversions_and_device_copies_are_of_no_engine() -> None:
    """Engines use them; they have torch and the bytes' description, no more."""
    conversions = ["integrations", "canonical"]
    shared = [*(SOURCE / "device").glob("*.py"), *SOURCE.joinpath(*conversions).glob("*.py")]
    for path in sorted(shared):
        for name in imports(path):
            library, *rest = name.split(".")
            own = rest[:1] in (["errors"], ["kvspec"], ["device"])
            if part_of(path) == "integrations":
                own = own or rest[:2] == conversions
            assert library not in ("vllm", "transformers"), f"{path.name} imports {name}"
            assert library != "prfaas" or own, f"{path.name} imports {name}"


def test_parts_have_no_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for path in FILES:
        targets = {name.split(".")[1] for name in imports(path) if name.startswith("prfaas.")}
        graph.setdefault(part_of(path), set()).update(targets - {part_of(path)})
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_files_have_no_circle() -> None:
    """Not of imports for types only, either: of two files in a circle, neither is understood
    without the other."""
    modules = {_module(path): path for path in FILES}
    graph = {name: _imported(path, modules.keys()) - {name} for name, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names the circle


def _module(path: Path) -> str:
    words = ("prfaas", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(words).removesuffix(".__init__")


def _imported(path: Path, modules: Set[str]) -> set[str]:
    """Modules that a file imports: `from a import b` means the module `a.b`, or a name in `a`."""
    found = set(imports(path))
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            if names & modules:
                found = found - {node.module} | names
    return found & modules


def test_every_part_has_a_row() -> None:
    for path in FILES:
        level(part_of(path))
    for path in LAB_FILES:
        level(part_of(path, LABORATORY), LAB_ROWS)


def _words(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.List | ast.Tuple):
        return node.elts
    return node.args if isinstance(node, ast.Call) else []


def test_no_interpreter_searches_the_current_folder() -> None:
    """Without -P, `python -m` and `python -c` run modules of the folder that they start in, which
    may be a checkpoint's. A shell has no such option."""
    wrong = [
        f"{path.relative_to(SOURCE.parents[1])}:{after.lineno}"
        for path in [*FILES, *LAB_FILES]
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        for words in [_words(node)]
        for before, after in zip(words, words[1:], strict=False)
        if isinstance(after, ast.Constant)
        and after.value in ("-m", "-c")
        and not (isinstance(before, ast.Constant) and before.value in ("-P", "sh"))
    ]
    assert not wrong, f"use `interpreter.module_command`: {wrong}"
