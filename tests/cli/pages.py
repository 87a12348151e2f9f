"""Reads the pages that `--html` writes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any


def page_data(path: Path) -> Any:
    """The data of a self-contained page."""
    text = path.read_text(encoding="utf-8")
    found = re.search(r'<script type="application/json"[^>]*>(.*?)</script>', text, re.DOTALL)
    assert found is not None, "the page has data"
    return json.loads(found[1])
