"""The line of a request has at most 2 KB in both formats, whatever clients and members send."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prfaas.contracts.openai import Usage
from prfaas.errors import RequestError
from prfaas.gateway.api.metrics import ApiMetrics, PromptRecord, RequestRecord
from prfaas.gateway.api.request_log import RequestLog
from prfaas.gateway.following.request_line import MOST_BYTES, fitting
from prfaas.gateway.request import RequestTrace
from prfaas.launch.request_outcomes import parse_outcome
from prfaas.service.logging import JsonFormatter
from prfaas_lab.testing.clock import FakeClock

TEXT_FORMAT = logging.Formatter("%(asctime)s %(name)s %(message)s")
MOST_PROMPTS = 128
# Control characters take six bytes in JSON, others up to four; half a pair is not even UTF-8.
NAMES = st.text(st.characters(codec=None), max_size=80)
LONG = st.text(st.characters(codec=None), max_size=50).map(lambda text: text * 40)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def logged(fill: Any, error: str = "") -> logging.LogRecord:
    """The record of a request that `fill` has filled in, and that ended with this error."""
    lines, logger = Lines(), logging.getLogger("prfaas.gateway.requests")
    before = logger.level
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        with RequestLog(ApiMetrics(), FakeClock()).record("req-1", "/v1/completions", "a") as one:
            fill(one)
            if error:
                raise RequestError(503, "overloaded", error)
    except RequestError:
        pass
    finally:
        logger.removeHandler(lines)
        logger.setLevel(before)
    (record,) = lines.records
    return record


def both(record: logging.LogRecord) -> list[str]:
    lines = [TEXT_FORMAT.format(record), JsonFormatter().format(record)]
    for line in lines:
        assert len(line.encode()) + 1 <= MOST_BYTES, len(line.encode())
    return lines


def filled(trace: RequestTrace, names: Sequence[str]) -> RequestTrace:
    home, cluster, prefill, decode, reason = names
    trace.home, trace.cluster, trace.prefill, trace.decode = home, cluster, prefill, decode
    trace.reason = reason
    return trace


@settings(max_examples=50)
@given(
    st.lists(NAMES, min_size=5, max_size=5),
    LONG,
    st.lists(LONG, max_size=20),
    st.sampled_from([0, 1, 2, 7, MOST_PROMPTS]),
)
def test_a_line_is_never_longer(
    names: list[str], error: str, failures: list[str], prompts: int
) -> None:
    def fill(record: RequestRecord) -> None:
        filled(record.trace, names)
        record.trace.failures += failures
        record.prompts = [
            PromptRecord(filled(RequestTrace(0.0), names), 100, Usage(1, 2)) for _ in range(prompts)
        ]

    text, as_json = both(logged(fill, error))
    fields = json.loads(text[text.index('{"id":') :])
    assert parse_outcome(text) is not None
    line = json.loads(as_json)
    assert {name: line[name] for name in fields} == fields
    assert fields["id"] == "req-1"


def test_a_list_of_prompts_counts_those_that_are_left_out() -> None:
    def fill(record: RequestRecord) -> None:
        trace = filled(RequestTrace(0.0), ["pd", "far", "far-0", "pd-0", "long"])
        record.prompts = [PromptRecord(trace, 7, None)] * MOST_PROMPTS

    text, _ = both(logged(fill))
    fields = json.loads(text[text.index('{"id":') :])
    assert 0 < len(fields["prompts"]) < MOST_PROMPTS
    assert len(fields["prompts"]) + fields["prompts_left_out"] == MOST_PROMPTS
    assert len(text) > MOST_BYTES / 2, "as many as fit"


def test_an_ordinary_request_is_logged_as_it_is() -> None:
    def fill(record: RequestRecord) -> None:
        filled(record.trace, ["pd", "far", "far-0", "pd-0", "long: 12 tokens"])
        record.trace.failures.append("far-1 has fallen silent")

    text, as_json = both(logged(fill))
    fields = json.loads(text[text.index('{"id":') :])
    assert fields["failures"] == ["far-1 has fallen silent"]
    assert fields["reason"] == "long: 12 tokens"
    line = json.loads(as_json)
    assert line["message"] == "request completed" and line["event"] == "request"
    assert parse_outcome(as_json) == parse_outcome(text) is not None


@pytest.mark.parametrize("character", ["\x00", "ß", "語", "🙂", "\ud800", '"', "\\"])
def test_every_kind_of_character_is_counted_in_bytes(character: str) -> None:
    fields, text = fitting(
        {"id": "r", "error": character * 500, "failures": [character * 500] * 8, "total_s": 1.0}
    )
    assert len(text.encode()) <= MOST_BYTES and json.loads(text)["total_s"] == 1.0
    assert fields["error"].startswith(character) or character == "\ud800"
