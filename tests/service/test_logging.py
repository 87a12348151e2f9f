"""The log as JSON: one object per line, whatever is logged."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from datetime import datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prfaas.service.logging import MOST_EXCEPTION, MOST_MESSAGE, JsonFormatter, with_fields

TEXTS = st.text(st.characters(codec=None), max_size=200)


def line(message: str, *arguments: object, **more: Any) -> dict[str, Any]:
    """What the formatter makes of one call."""
    record = logging.getLogger("prfaas.x").makeRecord(
        *("prfaas.x", logging.WARNING, "file", 1, message, arguments, more.get("exc_info")),
        extra=more.get("extra"),
    )
    text = JsonFormatter().format(record)
    assert "\n" not in text
    found: dict[str, Any] = json.loads(text)
    return found


def test_a_line_has_time_level_logger_message_and_fields() -> None:
    found = line("%s joined", "pd-0", extra=with_fields(event="member", node="pd-0", count=3))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", found["time"])
    assert datetime.fromisoformat(found["time"]).tzinfo is not None
    assert found == {
        "time": found["time"],
        "level": "warning",
        "logger": "prfaas.x",
        "message": "pd-0 joined",
        "event": "member",
        "node": "pd-0",
        "count": 3,
    }


def test_fields_cannot_hide_the_envelope() -> None:
    found = line("text", extra=with_fields(level="x", time="y", logger="z", exception="e"))
    assert found["level"] == "warning" and found["logger"] == "prfaas.x"
    assert "exception" not in found


def test_a_line_whose_text_consists_of_its_fields_has_another_message() -> None:
    found = line('{"id":"a"}', extra=with_fields("request completed", id="a"))
    assert found["message"] == "request completed" and found["id"] == "a"


def test_an_exception_is_one_line_with_its_end() -> None:
    try:
        raise ValueError("x" * 100_000 + "the end")
    except ValueError:
        found = line("failed", exc_info=sys.exc_info())
    assert len(found["exception"]) <= MOST_EXCEPTION and found["exception"].endswith("the end")


@given(TEXTS, st.dictionaries(TEXTS, TEXTS | st.integers() | st.lists(TEXTS), max_size=5))
def test_every_text_makes_a_line_of_json(text: str, fields: dict[str, Any]) -> None:
    found = line("%s", text, extra=with_fields(**fields))
    assert len(found["message"]) <= 10 * MOST_MESSAGE


def test_a_long_message_is_cut() -> None:
    found = line("%s", "y" * 100_000, extra=with_fields(field="z" * 100_000))
    assert len(found["message"]) == len(found["field"]) == MOST_MESSAGE


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_process_logs_to_standard_error(log_format: str) -> None:
    script = (
        "import logging\n"
        "from prfaas.service.logging import configure_logging, with_fields\n"
        f"configure_logging('info', {log_format!r})\n"
        "logging.getLogger('prfaas.y').debug('unseen')\n"
        "logging.getLogger('prfaas.y').info('seen', extra=with_fields(n=1))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    assert ended.stdout == ""
    (printed,) = ended.stderr.splitlines()
    if log_format == "json":
        assert json.loads(printed)["message"] == "seen" and json.loads(printed)["n"] == 1
    else:
        assert printed.endswith("prfaas.y seen")
