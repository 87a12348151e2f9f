"""Pages: their places are filled, their text is escaped, and their policy allows their scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import pytest

from prfaas.console import page
from tests.gateway.console.made_scenes import HOSTILE, PARTS


@pytest.fixture(autouse=True)
def tiny_assets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "page_parts", lambda: PARTS)


def scripts(html: str) -> list[tuple[str, str]]:
    """Attributes and text of every script element, as a browser separates them."""
    return re.findall(r"<script([^>]*)>(.*?)</script>", html, re.DOTALL)


def sha256(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def test_the_live_page_names_assets_by_their_hash() -> None:
    found = page.live_page(HOSTILE)
    assert "<img" not in found.html and "&lt;img/src=x" in found.html
    (first, import_map), (second, empty) = scripts(found.html)
    assert first == ' type="importmap"' and empty == ""
    assert json.loads(import_map)["imports"] == {
        "prfaas/live": "./console/assets/live.js?v=1123456789abcdef",
        "prfaas/dom": "./console/assets/dom.js?v=2123456789abcdef",
        "prfaas/report": "./console/assets/report.js?v=3123456789abcdef",
    }
    assert 'src="console/assets/live.js?v=1123456789abcdef"' in second
    assert 'href="console/assets/console.css?v=0123456789abcdef"' in found.html
    policy = found.headers["Content-Security-Policy"]
    assert f"script-src 'self' {sha256(import_map)};" in policy
    assert "unsafe" not in policy and "data:" not in policy.replace("img-src 'self' data:", "")
    assert "<!--" not in found.html


def test_the_login_page_has_no_script() -> None:
    found = page.login_page("title", HOSTILE)
    assert scripts(found.html) == [] and "<img" not in found.html
    assert '<p role="alert">&lt;img' in found.html
    assert "script-src 'none'" in found.headers["Content-Security-Policy"]
    assert "alert" not in page.login_page("title").html


def test_a_self_contained_page_has_everything_in_one_file() -> None:
    data = {"name": HOSTILE, "comment": "<!--entry--><!--data-->", "rate": 1.5}
    html = page.self_contained(HOSTILE, "report", data)
    assert "<img" not in html
    (_, import_map), (kind, text), (module, start) = scripts(html)
    assert kind == f' type="application/json" id="{page.DATA_ID}"' and json.loads(text) == data
    assert module == ' type="module"' and start == 'import "prfaas/report";'
    for name, address in json.loads(import_map)["imports"].items():
        head, _, content = address.partition(",")
        assert head == "data:text/javascript;base64"
        asset = PARTS.assets[name.removeprefix("prfaas/") + ".js"]
        assert base64.b64decode(content) == asset.content
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    policy = policy.replace("&#x27;", "'")
    assert f"script-src data: {sha256(import_map)} {sha256(start)};" in policy
    assert (
        f"style-src {sha256('main { color: red }')};" in policy and "default-src 'none'" in policy
    )
    assert "<style>main { color: red }</style>" in html
    assert html.index("Content-Security-Policy") < html.index("<script")
    assert "src=" not in html.replace("src=x", "") and "href=" not in html, "no other file"


def test_a_page_needs_its_module() -> None:
    with pytest.raises(AssertionError, match="no module is named nothing"):
        page.self_contained("title", "nothing", {})
