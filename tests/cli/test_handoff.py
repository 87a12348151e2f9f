from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prfaas.clock import MonotonicClock
from prfaas.contracts.readiness import NodeReady
from prfaas.errors import InputError
from prfaas.studies.single_handoff import HandoffReport, HandoffRequest, NodePair, run_handoff
from tests.cli.runner import Result
from tests.cli.test_node import EMULATED
from tests.node.hosts import Process

Run = Callable[..., Result]
SMALL = ("--set", "node.emulated.time_scale=0.01", "--", "--memory", "64MiB")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "kvd.key"
    file.write_text("a-key-that-is-hard-to-guess\n")
    return file


@pytest.fixture(scope="module")
def urls(key_file: Path) -> Iterator[list[str]]:
    """Two compatible nodes, one incompatible node, and one whose kvd requires a key."""
    nodes = [
        Process("node", *EMULATED, "--set", f"node.emulated.byte_scale={scale}", *more, *SMALL)
        for scale, *more in (
            ("1e-4",),
            ("1e-4",),
            ("2e-4",),
            ("1e-4", "--member-key-file", str(key_file)),
        )
    ]
    try:
        yield [node.ready(NodeReady).http for node in nodes]
    finally:
        for node in nodes:
            node.popen.terminate()
        for node in nodes:
            node.stop()


def test_each_step_is_shown_with_its_time_and_bytes(prfaas: Run, urls: list[str]) -> None:
    shown = prfaas("handoff", *urls[:2], "--tokens", "500", "--compare")
    assert shown.code == 0, shown.err
    assert "prompt of 500 tokens, 448 handed off" in shown.out
    for step in ("grant", "prefill", "commit", "decode", "compare"):
        assert step in shown.out
    assert "The prefill node computes the same answer." in shown.out


def test_a_second_hand_off_sends_nothing(prfaas: Run, urls: list[str]) -> None:
    arguments = ["handoff", *urls[:2], "--tokens", "500", "--seed", "2", "--json"]
    first, second = (json.loads(prfaas(*arguments).out) for _ in range(2))
    steps = [{step["name"]: step for step in report["steps"]} for report in (first, second)]
    assert steps[0]["commit"]["nbytes"] > 0 and steps[1]["commit"]["nbytes"] == 0
    assert first["answer"] == second["answer"] and len(first["answer"]) == 16


def test_a_prompt_too_short_to_hand_off_is_decoded(prfaas: Run, urls: list[str]) -> None:
    report = json.loads(prfaas("handoff", *urls[:2], "--tokens", "1", "--json").out)
    assert [step["name"] for step in report["steps"]] == ["decode"]
    assert len(report["answer"]) == 16


def test_a_pair_that_does_not_fit_is_refused_with_the_reason(prfaas: Run, urls: list[str]) -> None:
    refused = prfaas("handoff", urls[2], urls[1], "--tokens", "500")
    assert refused.code == 2
    assert "revision: bytes x 0.0001 here, bytes x 0.0002 there" in refused.err


def test_doctor_says_beforehand_what_a_hand_off_finds(prfaas: Run, urls: list[str]) -> None:
    fits = prfaas("doctor", "pair", *urls[:2], "--tokens", "448", "--json")
    assert fits.code == 0 and fits.json["can_hand_over"]
    handed = prfaas("handoff", *urls[:2], "--tokens", "500", "--seed", "7", "--json").json
    (commit,) = [step for step in handed["steps"] if step["name"] == "commit"]
    assert fits.json["costs"][1]["nbytes"] == commit["nbytes"]
    refused = prfaas("doctor", "pair", urls[2], urls[1], "--json")
    assert refused.code == 1
    (difference,) = refused.json["differences"]
    assert difference["field"] == "revision" and difference["final"]


def test_a_given_length_is_handed_off(urls: list[str]) -> None:
    """`prfaas bench pairs` hands off at any length, not only where a gateway would."""
    pair = NodePair(*urls[:2], None, None)
    ids = [40 + at % 50 for at in range(150)]

    def run(tokens: int) -> HandoffReport:
        request = HandoffRequest(ids, 4, "", handoff_tokens=tokens, decode_fields={"seed": 1})
        return asyncio.run(run_handoff(pair, request, MonotonicClock()))

    report = run(37)
    assert report.handoff_tokens == 37 and report.decode_cached == 37
    assert report.sent_bytes and not any(report.skip_tokens.values())
    assert report.logprobs is None and report.answer is not None and len(report.answer) == 4
    for wrong in (150, -1):
        with pytest.raises(InputError, match="leave at least the last token"):
            run(wrong)


def test_the_key_is_sent_to_a_kvd_that_requires_it(
    prfaas: Run, urls: list[str], key_file: Path
) -> None:
    arguments = ["handoff", urls[0], urls[3], "--tokens", "500", "--seed", "3"]
    refused = prfaas(*arguments)
    assert refused.code == 2 and "HTTP 401" in refused.err
    shown = prfaas(*arguments, "--member-key-file", str(key_file), "--compare")
    assert shown.code == 0, shown.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["http://127.0.0.1:1", "http://127.0.0.1:1"], "exactly one of --prompt and --tokens"),
        (["http://127.0.0.1:1", "http://127.0.0.1:1", "--tokens", "0"], "--tokens"),
        (
            ["http://127.0.0.1:1", "http://127.0.0.1:1", "--tokens", "9"],
            "check that the process is running",
        ),
        (["http://127.0.0.1:1", "http://127.0.0.1:1", "--tokens", "9", "--prompt", "x"], "either"),
    ],
)
def test_what_cannot_be_tried_is_one_line(prfaas: Run, arguments: list[str], says: str) -> None:
    result = prfaas("handoff", *arguments)
    assert result.code == 2
    assert says in result.err and result.err.count("\n") == 1
