"""The errors, and the tree of them that is drawn in the docstring of `prfaas.errors`.

The laboratory lists its own ones."""

from __future__ import annotations

import ast
import builtins
import re
from pathlib import Path

import prfaas_lab
from prfaas import errors
from prfaas.errors import ConnectionLost, InputError, PeerError, PeerHttpError, RequestError

SOURCE = Path(errors.__file__).parent
LABORATORY = Path(prfaas_lab.__file__).parent
DRAWN = re.compile(r"^    ([│├└─ ]*)([A-Z]\w+)(?: |$)", re.MULTILINE)
SUBCLASS = re.compile(r"^\s*class \w+\(", re.MULTILINE)
LOCAL = re.compile(r"^    (prfaas[\w.]*)\.(\w+) ", re.MULTILINE)


def test_one_line_names_place_problem_and_fix() -> None:
    error = InputError("is 0", file="a.toml", where="links.0.gbps", fix="give more")
    assert str(error) == "a.toml: links.0.gbps: is 0; give more"


def test_an_error_keeps_the_file_it_names() -> None:
    assert InputError("x").in_file("outer").file == "outer"
    assert InputError("x", file="inner").in_file("outer").file == "inner"


def test_only_a_peers_response_is_a_peer_error() -> None:
    said = PeerHttpError(503, "overloaded", "no memory", param="prompt", retry_after_s=2.0)
    assert isinstance(said, PeerError) and str(said) == said.message == "no memory"
    assert (said.status, said.code, said.param, said.retry_after_s) == (
        *(503, "overloaded"),
        *("prompt", 2.0),
    )
    assert not isinstance(RequestError(400, "bad", "x"), PeerError)


def exception_classes() -> set[tuple[str, str]]:
    """Module and name of every exception class, found by the names of its bases."""
    defined = [
        (path.relative_to(folder.parent), node)
        for folder in (SOURCE, LABORATORY)
        for path in sorted(folder.rglob("*.py"))
        if SUBCLASS.search(text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
    ]
    known = {
        name
        for name, value in vars(builtins).items()
        if isinstance(value, type) and issubclass(value, BaseException)
    }
    found: set[tuple[str, str]] = set()
    while True:
        more = {
            (".".join(path.with_suffix("").parts), node.name)
            for path, node in defined
            if any(ast.unparse(base).rpartition(".")[2] in known for base in node.bases)
        }
        if more == found:
            return found
        found = more
        known |= {name for _, name in found}


def drawn_tree() -> dict[str, set[str]]:
    """Every drawn class with its drawn parents."""
    parents: dict[str, set[str]] = {}
    above: list[str] = []
    for branch, name in DRAWN.findall(errors.__doc__ or ""):
        depth = len(branch) // 4
        del above[depth:]
        parents.setdefault(name, set()).update(above[-1:])
        above.append(name)
    return parents


def test_the_docstring_draws_every_error_under_its_bases() -> None:
    actual = {
        name: {base.__name__ for base in value.__bases__} - {"Exception"}
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert ConnectionLost.__name__ in actual
    assert drawn_tree() == actual


def test_the_docstring_lists_every_error_that_is_defined_elsewhere() -> None:
    elsewhere = {found for found in exception_classes() if found[0] != errors.__name__}
    for package, listed in (("prfaas", errors.__doc__), ("prfaas_lab", prfaas_lab.__doc__)):
        own = {(module, name) for module, name in elsewhere if module.startswith(f"{package}.")}
        assert set(LOCAL.findall(listed or "")) == own
