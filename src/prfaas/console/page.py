"""The console's pages: a template, the modules and the style sheet of `assets`, put together.

The live page and the login page take modules and style from the gateway, under addresses that have
a hash of the content. A self-contained page has everything in one file: its modules are `data:`
addresses in the import map. Every page has a content security policy that allows exactly its own
scripts. Text that comes from elsewhere is escaped here, and the data of a page is JSON that no
browser takes for markup.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import msgspec

ASSETS = "console/assets/"  # where a gateway serves them, relative to the page
STYLE = "console.css"
LIVE = "live"  # the module that the live page starts with
DATA_ID = "data"  # the element with the data of a self-contained page
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_PREFIX = "prfaas/"  # of the modules' names in import maps

# Forms are sent with their origin, which the gateway checks. With `no-referrer` browsers would send
# `null` instead.
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Asset(NamedTuple):
    content: bytes
    content_type: str
    version: str  # a hash of the content


class Page(NamedTuple):
    html: str
    headers: Mapping[str, str]  # to be sent with it, the content security policy among them


class PageParts(NamedTuple):
    """The files of `assets`."""

    templates: Mapping[str, str]  # by the name of the file
    assets: Mapping[str, Asset]  # modules and style sheets, by the name of the file


@cache
def page_parts() -> PageParts:
    """Reads the files once."""
    templates: dict[str, str] = {}
    assets: dict[str, Asset] = {}
    for file in sorted(files("prfaas.console").joinpath("assets").iterdir(), key=lambda f: f.name):
        suffix = file.name[file.name.rfind(".") :]
        if suffix == ".html":
            templates[file.name] = file.read_text(encoding="utf-8")
        elif suffix in _TYPES:
            content = file.read_bytes()
            version = hashlib.sha256(content).hexdigest()[:16]
            assets[file.name] = Asset(content, _TYPES[suffix], version)
    return PageParts(templates, assets)


def asset(name: str) -> Asset | None:
    """A module or a style sheet, by the name of its file."""
    return page_parts().assets.get(name)


def live_page(title: str) -> Page:
    """The page of a gateway. It has no state: the browser requests that."""
    parts = page_parts()
    imports = {
        f"{_PREFIX}{name.removesuffix('.js')}": f"./{_address(name, found)}"
        for name, found in parts.assets.items()
        if name.endswith(".js")
    }
    import_map = _json({"imports": imports})
    entry = f"{LIVE}.js"
    address = html.escape(_address(entry, parts.assets[entry]))
    text = _fill(
        parts.templates["page.html"],
        title=html.escape(title),
        style=_style_link(parts),
        importmap=f'<script type="importmap">{import_map}</script>',
        entry=f'<script type="module" src="{address}"></script>',
        data="",
    )
    return Page(text, {**_HEADERS, "Content-Security-Policy": _live_policy(import_map)})


def login_page(title: str, problem: str = "") -> Page:
    """The page for a browser without a session. `problem`: why the latest login has failed."""
    parts = page_parts()
    shown = f'<p role="alert">{html.escape(problem)}</p>' if problem else ""
    text = _fill(
        parts.templates["login.html"],
        title=html.escape(title),
        style=_style_link(parts),
        problem=shown,
    )
    return Page(text, {**_HEADERS, "Content-Security-Policy": _live_policy()})


def self_contained(title: str, entry: str, data: object) -> str:
    """A page in one file, which opens from disk. The module `entry` starts, and finds `data` as the
    JSON text of the element with the id `DATA_ID`."""
    parts = page_parts()
    modules = {
        f"{_PREFIX}{name.removesuffix('.js')}": _data_address(found)
        for name, found in parts.assets.items()
        if name.endswith(".js")
    }
    assert f"{_PREFIX}{entry}" in modules, f"no module is named {entry}"
    import_map = _json({"imports": modules})
    start = f"import {_json(_PREFIX + entry)};"
    style = parts.assets[STYLE].content.decode()
    # The modules have `data:` addresses: a page on disk has no origin that could serve them.
    policy = (
        f"default-src 'none'; script-src data: {_hash(import_map)} {_hash(start)}; "
        f"style-src {_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
    )
    text = _fill(
        parts.templates["page.html"],
        title=html.escape(title),
        style=f"<style>{style}</style>",
        importmap=f'<script type="importmap">{import_map}</script>',
        entry=f'<script type="module">{start}</script>',
        data=f'<script type="application/json" id="{DATA_ID}">{_json(data)}</script>',
    )
    meta = f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">'
    head, found, rest = text.partition("<head>")
    assert found, "the template has no <head>"
    return f"{head}{found}\n{meta}{rest}"


def _live_policy(import_map: str | None = None) -> str:
    scripts = "script-src 'none'"
    if import_map is not None:
        scripts = f"script-src 'self' {_hash(import_map)}"
    return (
        f"default-src 'none'; {scripts}; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    )


def _style_link(parts: PageParts) -> str:
    address = html.escape(_address(STYLE, parts.assets[STYLE]))
    return f'<link rel="stylesheet" href="{address}">'


def _address(name: str, found: Asset) -> str:
    return f"{ASSETS}{name}?v={found.version}"


def _data_address(found: Asset) -> str:
    return f"data:{found.content_type};base64,{base64.b64encode(found.content).decode()}"


def _fill(template: str, **values: str) -> str:
    """Puts the values into the template's places, in one pass: a value may contain the text of
    another place, which stays as it is."""
    pieces = template.split("<!--")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, end, rest = piece.partition("-->")
        filled.append(values[name] + rest if end and name in values else f"<!--{piece}")
    return "".join(filled)


def _json(data: object) -> str:
    """JSON for a script element: without `<`, nothing in it can end the element."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
