"""`prfaas doctor pair --try`: one hand-off between emulated nodes, and what its report says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from prfaas.clock import MonotonicClock
from prfaas.contracts.readiness import NodeReady
from prfaas.errors import InputError, PeerError
from prfaas.studies.pair_check import EnginePair
from prfaas.studies.single_handoff import HandoffReport, HandoffRequest, run_handoff
from tests.cli.runner import Result
from tests.cli.test_node import EMULATED
from tests.node.hosts import Process
from tests.secret_files import write_secret

Run = Callable[..., Result]
SMALL = ("--set", "node.emulated.time_scale=0.01", "--", "--memory", "64MiB")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "kvd.key"
    write_secret(file, "a-key-that-is-hard-to-guess\n")
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


def hand_off(pair: EnginePair, tokens: int, **more: object) -> HandoffReport:
    request = HandoffRequest([40 + at % 50 for at in range(tokens)], 16, **more)  # type: ignore[arg-type]
    return asyncio.run(run_handoff(pair, request, MonotonicClock()))


def test_each_step_is_shown_with_its_time_and_bytes(prfaas: Run, urls: list[str]) -> None:
    shown = prfaas("doctor", "pair", *urls[:2], "--try", "--tokens", "500")
    assert shown.code == 0, shown.err
    assert "They can hand over to each other" in shown.out
    assert "prompt of 500 tokens, 448 handed off" in shown.out
    for step in ("grant", "prefill", "commit", "decode", "compare"):
        assert step in shown.out
    assert "answer equals the prefill node" in shown.out


def test_the_reference_has_the_cuts_of_the_hand_off(prfaas: Run, urls: list[str]) -> None:
    for _ in range(2):  # the second one resumes from nothing either: its salt is new
        found = prfaas("doctor", "pair", *urls[:2], "--try", "--tokens", "500", "--json").json
        tried = found["tried"]
        assert tried["comparison"] == {
            **{"rule": "same_cuts", "same": True, "first_difference": None, "reason": ""},
            **{"largest_rounding": None, "margin": None, "cut_tokens": [448, 500]},
        }
        assert tried["expected"] == tried["answer"] and tried["prefill_cached"] == 0


def test_a_given_salt_is_used_and_cached_state_is_no_bit_for_bit_reference(urls: list[str]) -> None:
    pair = EnginePair(*urls[:2])
    first, second = (hand_off(pair, 500, salt="mine", compare=True) for _ in range(2))
    assert first.comparison is not None and first.comparison.rule == "same_cuts"
    assert second.prefill_cached == 448
    found = second.comparison
    assert found is not None and found.rule == "every_token"
    assert found.same and found.cut_tokens is None
    assert "cached state was resumed from" in found.reason


@asynccontextmanager
async def like_vllm(url: str, shift: float | None) -> AsyncIterator[tuple[str, str]]:
    """(URL, URL of its kvd) of a server with the node's answers, which has log-probabilities that
    are larger by `shift` (None: it refuses to report them), and does not report cuts."""
    async with aiohttp.ClientSession() as http:

        async def models(request: web.Request) -> web.Response:
            async with http.get(f"{url}/v1/models") as answer:
                found = await answer.json()
            kvds.append(found["data"][0].pop("prfaas")["kvd_url"])
            return web.json_response(found)

        async def complete(request: web.Request) -> web.Response:
            body = await request.json()
            wanted = body.pop("logprobs", None)
            if wanted is not None and shift is None:
                return web.json_response({"error": {"message": "no logprobs"}}, status=400)
            assert body.pop("return_tokens_as_token_ids", None) is (True if wanted else None)
            assert "do_reference" not in body.get("kv_transfer_params", {})
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                found = await answer.json()
            (found.get("kv_transfer_params") or {}).pop("cut_tokens", None)
            for choice in found.get("choices", ()) if wanted else ():
                near = [
                    {f"token_id:{token}": -0.1 + (shift or 0.0)} for token in choice["token_ids"]
                ]
                choice["logprobs"] = {
                    "top_logprobs": [{**one, "token_id:-1": -3.0} for one in near]
                }
            return web.json_response(found, status=answer.status)

        kvds: list[str] = []
        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/completions", complete)
        async with TestServer(app) as server:
            address = str(server.make_url("")).rstrip("/")
            async with http.get(f"{address}/v1/models") as answer:
                assert answer.status == 200
            yield address, kvds[0]


@pytest.mark.parametrize(
    ("shift", "rule", "same"),
    [
        (0.01, "log_probabilities", True),
        (0.9, "log_probabilities", False),
        (None, "every_token", True),
    ],
)
async def test_servers_that_do_not_report_cuts_are_compared_by_log_probabilities(
    urls: list[str], shift: float | None, rule: str, same: bool
) -> None:
    none = None if shift is None else 0.0
    async with like_vllm(urls[0], none) as prefill, like_vllm(urls[1], shift) as decode:
        pair = EnginePair(prefill[0], decode[0], prefill[1], decode[1])
        ids = [40 + at % 50 for at in range(200)]
        report = await run_handoff(pair, HandoffRequest(ids, 4, compare=True), MonotonicClock())
    found = report.comparison
    assert found is not None and (found.rule, found.same) == (rule, same)
    assert "does not report where it cuts a prompt" in found.reason
    assert found.first_difference is None and report.answer == report.expected
    if shift is not None:
        assert found.largest_rounding == pytest.approx(shift)


async def test_a_server_that_does_not_report_its_kvd_needs_it_given(
    prfaas: Run, urls: list[str]
) -> None:
    async with like_vllm(urls[0], None) as (server, kvd):
        arguments = ["doctor", "pair", server, urls[1], "--try", "--tokens", "100", "--json"]
        refused = await asyncio.to_thread(prfaas, *arguments)
        assert refused.code == 2 and "neither a kvd nor a prfaas node" in refused.err
        given = await asyncio.to_thread(prfaas, *arguments, "--kvd-a", kvd)
        assert given.code == 0 and given.json["tried"]["handoff_tokens"] == 64, given.err
    only_kvds = await asyncio.to_thread(prfaas, "doctor", "pair", kvd, urls[1], "--try")
    assert only_kvds.code == 2 and "this is not the server of an engine" in only_kvds.err


def test_a_second_hand_off_sends_nothing(urls: list[str]) -> None:
    first, second = (hand_off(EnginePair(*urls[:2]), 500) for _ in range(2))
    assert first.sent_bytes and second.sent_bytes == 0
    assert first.answer == second.answer and first.answer is not None and len(first.answer) == 16


def test_a_prompt_too_short_to_hand_off_is_decoded(urls: list[str]) -> None:
    report = hand_off(EnginePair(*urls[:2]), 1)
    assert [step.name for step in report.steps] == ["decode"] and report.form is None
    assert report.answer is not None and len(report.answer) == 16


def test_a_pair_that_does_not_fit_is_refused_with_the_reason(prfaas: Run, urls: list[str]) -> None:
    refused = prfaas("doctor", "pair", urls[2], urls[1], "--try", "--tokens", "500", "--json")
    assert refused.code == 1 and refused.json["tried"] is None
    (difference,) = refused.json["differences"]
    assert difference["field"] == "revision" and difference["final"]
    with pytest.raises(PeerError, match=r"revision: bytes x 0.0001 here, bytes x 0.0002 there"):
        hand_off(EnginePair(urls[2], urls[1]), 500)


def test_the_estimate_is_what_a_hand_off_sends(prfaas: Run, urls: list[str]) -> None:
    told = prfaas("doctor", "pair", *urls[:2], "--tokens", "448", "--json").json
    assert told["can_hand_over"]
    report = hand_off(EnginePair(*urls[:2]), 500, salt="never used before")
    assert told["costs"][1]["nbytes"] == report.sent_bytes


def test_a_given_length_is_handed_off(urls: list[str]) -> None:
    """`bench/pairs.py` hands off at any length, not only where a gateway would."""
    pair, fields = EnginePair(*urls[:2]), {"seed": 1}
    report = hand_off(pair, 150, handoff_tokens=37, decode_fields=fields)
    assert report.handoff_tokens == 37 and report.decode_cached == 37
    assert report.sent_bytes and not any(report.skip_tokens.values())
    assert report.logprobs is None and report.answer is not None
    for wrong in (150, -1):
        with pytest.raises(InputError, match="leave at least the last token"):
            hand_off(pair, 150, handoff_tokens=wrong)


def test_the_key_is_sent_to_a_kvd_that_requires_it(
    prfaas: Run, urls: list[str], key_file: Path
) -> None:
    arguments = ["doctor", "pair", urls[0], urls[3], "--try", "--tokens", "500"]
    refused = prfaas(*arguments)
    assert refused.code == 2 and "HTTP 401" in refused.err
    shown = prfaas(*arguments, "--member-key-file", str(key_file))
    assert shown.code == 0, shown.err
