"""The browser's files: small, without libraries, without a way to turn names into markup.

The modules without a DOM (geometry, scales, the store, words) have their own tests in `node/`,
which run here where node is installed. `tests/browser` tests the pages in a real browser.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "src" / "prfaas" / "console" / "assets"
NODE_TESTS = Path(__file__).parent / "node"
MODULES = sorted(ASSETS.glob("*.js"))
FILES = sorted(path for path in ASSETS.iterdir() if path.is_file())
MOST_BYTES = 200_000
MOST_LINES = 350
LONGEST_LINE = 100
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")

# Ways to parse text as markup or as code, and styles that the pages' policy would refuse.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser"
    r"|\beval\s*\(|new Function\b|setHTML|srcdoc|javascript:|cssText"
    r"|setAttribute\([^,]*,\s*\"style\""
)
REMOTE = re.compile(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}", re.IGNORECASE)
NAMESPACE = "http://www.w3.org/2000/svg"  # a name, which no browser fetches
HANDLER = re.compile(r"<[^>]*\s(on[a-z]+|style)\s*=", re.IGNORECASE)
IMPORT = re.compile(r"""(?:\bfrom|\bimport)\s*\(?\s*["']([^"']+)["']""")


def test_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < MOST_BYTES
    assert {path.suffix for path in FILES} == {".js", ".css", ".html"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_modules_are_readable(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0].startswith("// "), "a module opens with what it is for"
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= LONGEST_LINE


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_text_is_never_markup_or_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert FORBIDDEN.search(text) is None
    assert REMOTE.search(text.replace(NAMESPACE, "")) is None
    if path.suffix == ".html":
        assert HANDLER.search(text) is None, "the policy forbids inline handlers and styles"
        assert "<script" not in text, "the page builder adds the scripts, with their hashes"
    if path.suffix == ".css":
        assert "@import" not in text and "url(" not in text


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.name)
def test_imports_name_files(path: Path) -> None:
    for specifier in IMPORT.findall(path.read_text(encoding="utf-8")):
        package, _, name = specifier.partition("/")
        assert package == "prfaas", f"{specifier} is not in the import map"
        assert (ASSETS / f"{name}.js").exists(), specifier


def test_every_module_is_used() -> None:
    """The pages load `live` and `report`, and nothing else by name."""
    reached, left = set[str](), ["live", "report"]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            text = (ASSETS / f"{name}.js").read_text(encoding="utf-8")
            left += [found.partition("/")[2] for found in IMPORT.findall(text)]
    assert {path.stem for path in MODULES} == reached


def test_templates_have_their_places() -> None:
    page = (ASSETS / "page.html").read_text(encoding="utf-8")
    for place in ("title", "style", "importmap", "data", "entry"):
        assert page.count(f"<!--{place}-->") == 1, place
    assert page.index("<!--importmap-->") < page.index("<!--entry-->")
    login = (ASSETS / "login.html").read_text(encoding="utf-8")
    for place in ("title", "style", "problem"):
        assert login.count(f"<!--{place}-->") == 1, place
    assert 'form id="login" method="post" action="console/login"' in login


def test_classes_of_the_style_are_used() -> None:
    """A class that no module sets is a leftover, or a misspelt name."""
    style = (ASSETS / "console.css").read_text(encoding="utf-8")
    style = re.sub(r"/\*.*?\*/", "", style, flags=re.DOTALL)
    selectors = re.sub(r"\{[^{}]*\}", " ", style)
    others = [path for path in FILES if path.suffix != ".css"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in others)
    # Names that a module puts together: `tone-${...}`.
    made = ("tone-", "fill-", "mark-", "key-", "entry-")
    for name in sorted(set(re.findall(r"\.([a-z][a-z0-9-]*)", selectors))):
        if not name.startswith(made):
            assert re.search(rf"\b{re.escape(name)}\b", text), f".{name} is not used"


@needs_node
def test_modules_parse() -> None:
    """`node --check` of all files in one process, which reads them as modules."""
    assert NODE is not None
    script = """
        const { readFileSync } = require("node:fs");
        const { SourceTextModule } = require("node:vm");
        for (const path of process.argv.slice(1)) {
          new SourceTextModule(readFileSync(path, "utf8"), { identifier: path });
        }
    """
    command = [NODE, "--experimental-vm-modules", "-e", script, *map(str, MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@needs_node
def test_modules_without_a_dom() -> None:
    assert NODE is not None
    tests = sorted(str(path) for path in NODE_TESTS.glob("*.test.mjs"))
    command = [NODE, "--import", str(NODE_TESTS / "resolve.mjs"), "--test", *tests]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
