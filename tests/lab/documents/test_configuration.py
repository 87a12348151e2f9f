from __future__ import annotations

from pathlib import Path

from prfaas.config.deployment import Deployment
from prfaas.config.host import HostConfig
from prfaas_lab.documents.configuration import reference, sections

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_the_page_is_that_of_the_schema() -> None:
    assert PAGE.read_text() == reference(), "docs/configuration.md is stale; run `make docs`"


def test_every_key_and_section_has_a_meaning() -> None:
    for kind in (Deployment, HostConfig):
        for section in sections(kind):
            assert section.meaning, section.title
            for key in section.keys:
                assert key.meaning.endswith("."), f"{section.title} {key.name}: {key.meaning!r}"


def test_types_bounds_and_defaults_are_shown() -> None:
    keys = {
        (section.title, key.name): (key.kind, key.default)
        for kind in (Deployment, HostConfig)
        for section in sections(kind)
        for key in section.keys
    }
    assert keys["`[gateway.timeouts]`", "queue_s"] == ("number > 0", "60")
    assert keys["`[[links]]`", "from"] == ("string", "required")
    assert keys["`[gateway]`", "keys"] == ("tables", "empty")
    assert keys["`[scheduler]`", "threshold_tokens"] == ("integer >= 0", "none")
    assert keys["`[kvd]`", "gateways"] == ("list of strings", "empty")
    assert keys["`[node]`", "engine"] == ('"hf" or "emulated"', '"hf"')
