"""Guided decoding over HTTP with a tiny model: every answer follows its grammar."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prfaas.contracts.openai import TENANT_HEADER
from prfaas.engine.checkpoint.tokenizer import EOS, token_id
from prfaas.engine.guided import compiler
from prfaas.engine.guided.host_process import MODULE
from tests.engine.emulated.builders import emulated
from tests.engine.guided.test_compiler import ENDLESS, with_limits
from tests.node.local_api import BYTES, LocalApi, local_api, pieces
from tests.node.test_sampling_fields import node_server
from tests.waiting import HANG_S, wait_until

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["x", "yy", "ü"]}, "maxItems": 3},
    },
    "required": ["id", "tags"],
    "additionalProperties": False,
}
# A model without training would write blanks for ever, where JSON allows any number.
NO_BLANKS = {"logit_bias": {str(ord(blank)): -100 for blank in " \n\r\t"}}
SCHEMA_FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}


def follows_schema(text: str) -> bool:
    value = json.loads(text)
    assert value.keys() == {"id", "tags"}
    assert type(value["id"]) is int and 0 <= value["id"] <= 999
    return len(value["tags"]) <= 3 and set(value["tags"]) <= {"x", "yy", "ü"}


def is_object(text: str) -> bool:
    return isinstance(json.loads(text), dict)


Check = Callable[[str], Any]
GUIDED: dict[str, tuple[dict[str, Any], Check]] = {
    "json_schema": ({"response_format": SCHEMA_FORMAT, **NO_BLANKS}, follows_schema),
    "json": ({"structured_outputs": {"json": SCHEMA}, **NO_BLANKS}, follows_schema),
    "json text": (
        {"structured_outputs": {"json": json.dumps(SCHEMA), "disable_any_whitespace": True}},
        follows_schema,
    ),
    "regex": (
        {"structured_outputs": {"regex": r"[a-f]{2,5}-\d{3}"}},
        lambda text: re.fullmatch(r"[a-f]{2,5}-\d{3}", text),
    ),
    "choice": ({"structured_outputs": {"choice": ["yes", "no", "ä"]}}, ["yes", "no", "ä"].count),
    "grammar": (
        {
            "structured_outputs": {"grammar": 'root ::= "(" root ")" | "x" | "y"'},
            "logit_bias": {str(ord("(")): -1},
        },
        lambda text: re.fullmatch(r"\(*[xy]\)*", text) and text.count("(") == text.count(")"),
    ),
    # The bias ends the object and its strings soon.
    "json_object": (
        {
            "response_format": {"type": "json_object"},
            "logit_bias": {**NO_BLANKS["logit_bias"], str(ord("}")): 30, str(ord('"')): 20},
        },
        is_object,
    ),
}


async def answers(node: LocalApi, path: str, fields: dict[str, Any]) -> tuple[str, str]:
    """The text of the only choice, which is the same in pieces, and the reason of its end."""
    async with node.http.post(path, json=fields) as answer:
        (whole,) = (await answer.json())["choices"]
    async with node.http.post(path, json={**fields, "stream": True}) as answer:
        parts = [piece["choices"][0] for piece in await pieces(answer)]
    if "message" in whole:
        text = whole["message"]["content"]
        assert "".join(part["delta"].get("content", "") for part in parts) == text
    else:
        text = whole["text"]
        assert "".join(part["text"] for part in parts) == text
    assert parts[-1]["finish_reason"] == whole["finish_reason"]
    return text, whole["finish_reason"]


async def check_answer(node: LocalApi, name: str, seed: int) -> None:
    fields, check = GUIDED[name]
    given = {**fields, "max_tokens": 200, "seed": seed, "temperature": 1.5}
    if seed % 2:
        given |= {"messages": [{"role": "user", "content": "hi"}]}
        text, reason = await answers(node, "/v1/chat/completions", given)
    else:
        text, reason = await answers(node, "/v1/completions", {"prompt": "hi", **given})
    assert reason == "stop" and check(text), (name, seed, text)


async def test_every_answer_follows_its_grammar() -> None:
    async with node_server() as node, asyncio.TaskGroup() as tasks:
        for number, name in enumerate(GUIDED):
            tasks.create_task(check_answer(node, name, seed=number))


@pytest.mark.grid
async def test_more_answers_follow_their_grammars() -> None:
    async with node_server() as node:
        for first in range(7, 19, 4):
            async with asyncio.TaskGroup() as tasks:
                for name in GUIDED:
                    for seed in range(first, first + 4):
                        tasks.create_task(check_answer(node, name, seed))


async def test_a_grammar_comes_before_the_other_fields() -> None:
    async with node_server() as node:
        given: dict[str, Any] = {
            **{"prompt": "hi", "temperature": 0.0, "return_token_ids": True},
            "structured_outputs": {"choice": ["ab", "ac"]},
        }
        _, answer = await node.complete(**given, logit_bias={str(ord("c")): 100}, logprobs=3)
        (choice,) = answer["choices"]
        assert choice["text"] == "ac" and choice["token_ids"][:2] == [ord("a"), ord("c")]
        # As in vLLM, probabilities are those of the tokens that the grammar allows.
        first, second, _ = choice["logprobs"]["top_logprobs"]
        assert first.pop("a") == 0.0 and set(first.values()) == {-9999.0}
        assert sorted(value > -9999.0 for value in second.values()) == [False, True, True]
        # The grammar has ended, and every other token is excluded by another field.
        status, answer = await node.complete(**given, min_tokens=3)
        assert status == 500 and "together exclude every token" in answer["error"]["message"]


async def test_ignore_eos_continues_after_the_grammar() -> None:
    """As in vLLM, so that load generators get as many tokens as they ask for."""
    async with node_server() as node:
        _, answer = await node.complete(
            prompt="hi",
            structured_outputs={"choice": ["ab"]},
            ignore_eos=True,
            max_tokens=9,
            return_token_ids=True,
        )
        (choice,) = answer["choices"]
        a, b, end, *rest = choice["token_ids"]
        assert (a, b) == tuple(b"ab") and end in (token_id(EOS), token_id("<|im_end|>"))
        assert len(rest) == 6 and choice["finish_reason"] == "length"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
    ({"structured_outputs": {"json": {"type": "foo"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": "[1]"}}, "structured_outputs.json"),
    ({"structured_outputs": {"grammar": "start: a"}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs.json_object"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
    ),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
        "response_format.json_schema.schema",
    ),
    (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {"type": "foo"}},
            }
        },
        "response_format.json_schema.schema",
    ),
    ({"guided_json": {"type": "object"}}, "guided_json"),
]


async def test_what_cannot_be_used_is_refused_before_anything_is_computed() -> None:
    async with node_server() as node:
        for fields, param in REFUSED:
            for path in ("/v1/completions", "/v1/completions/render"):
                async with node.http.post(path, json={"prompt": "hi", **fields}) as answer:
                    error = (await answer.json())["error"]
                    assert answer.status == 400 and error["param"] == param, error
                    assert param in error["message"]


async def test_free_text_needs_no_grammar() -> None:
    async with local_api(emulated(), BYTES) as node:
        body = {"prompt": "hi", "response_format": {"type": "text"}}
        async with node.http.post("/v1/completions/render", json=body) as answer:
            assert answer.status == 200


async def test_an_engine_without_logits_refuses_grammars_by_name() -> None:
    async with local_api(emulated(), BYTES) as node:
        for fields, param in (
            ({"structured_outputs": {"regex": "a"}}, "structured_outputs.regex"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
        ):
            status, answer = await node.complete(prompt="hi", **fields)
            assert (status, answer["error"]["param"]) == (400, param)


async def test_an_endless_grammar_is_refused_and_delays_no_other_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing of it remains: no thread, no process."""
    monkeypatch.setattr(compiler, "COMPILE_S", HANG_S)
    with_limits(monkeypatch, COMPILE_CPU_S=0.5)

    def threads() -> set[str]:
        # Threads of pools start when they are first needed, and stay with nothing to do.
        pools = ("grammar", "prfaas-kvd-calls")
        names = (thread.name for thread in threading.enumerate())
        return {name for name in names if not any(pool in name for pool in pools)}

    others = processes()  # of other tests in this process

    def started() -> set[str]:
        return processes() - others

    async with node_server() as node:
        status, _ = await node.complete(prompt="hi", structured_outputs={"choice": ["no"]})
        assert status == 200
        before, alone = threads(), started()
        async with asyncio.TaskGroup() as tasks:
            hostile = [
                tasks.create_task(
                    node.complete(
                        prompt="hi",
                        structured_outputs={"grammar": ENDLESS.replace("60", f"6{number}")},
                    )
                )
                for number in range(2)
            ]
            while not all(work.done() for work in hostile):
                async with node.http.post(
                    "/v1/completions",
                    json={"prompt": "hi", "structured_outputs": {"choice": ["yes"]}},
                    headers={TENANT_HEADER: "victim"},
                ) as answer:
                    (choice,) = (await answer.json())["choices"]
                    assert answer.status == 200 and choice["text"] == "yes"
        for work in hostile:
            status, refused = work.result()
            assert status == 400 and "too complex" in refused["error"]["message"]
            assert refused["error"]["param"] == "structured_outputs.grammar"
        assert threads() == before
        # One more grammar is cached.
        wait_until(lambda: len(started()) == len(alone) + 1)
    wait_until(lambda: not started())


def processes() -> set[str]:
    """Of grammars, and their host: they have the host's command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                command = (folder / "cmdline").read_bytes().split(b"\0")
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:
                continue
            if MODULE.encode() in command:
                found.append((folder.name, parent))
    ours = {process for process, parent in found if parent == str(os.getpid())}
    return {process for process, parent in found if process in ours or parent in ours}
