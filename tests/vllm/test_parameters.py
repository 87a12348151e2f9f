"""Every parameter of a request, through a gateway: offloaded and local, with vLLM servers and with
`prfaas node`s of the same checkpoint. The answer is the one that vLLM itself gives."""

from __future__ import annotations

import json
import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.gateway.backends import MODEL, deployment
from tests.gateway.processes import GatewayProcess, gateway_process
from tests.node.hosts import running_hosts
from tests.vllm.cases import ALIGNED, PROMPTS, Case, case_id
from tests.vllm.parameters import CHATS, COMPLETIONS, MAX_TOKENS, OF_THE_PROMPT, Plain
from tests.waiting import HANG_S, wait_until

pytestmark = [
    pytest.mark.timeout(900),  # servers start and stop within it
    pytest.mark.parametrize("case", [("falcon-h1", ALIGNED)], indirect=True, ids=case_id),
]
TOLERANCE = 1e-3  # of a log-probability
PROMPT = PROMPTS["edges"][0][:300]  # two blocks of vLLM, and a part
MESSAGES = [{"role": "user", "content": "Why is the sky blue? " * 12}]
BASE = {"model": MODEL, "max_tokens": MAX_TOKENS, "temperature": 0.0, "return_token_ids": True}
# Ends of the text in generation_config.json. vLLM names the second one in stop_reason.
ENDS = (257, 260)
ENGINES = ("vllm", "node")
# Of the fields of completions. The others are of the grid.
OFTEN = ("nothing", "n", "logprobs", "stop_token_ids", "min_tokens", "logit_bias")
ROUTES = ("remote", "local")


@dataclass(frozen=True, slots=True)
class Gateway:
    process: GatewayProcess
    url: str

    def post(self, path: str, body: dict[str, Any], name: str) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "X-Request-Id": name},
        )
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def stream(self, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of a streamed answer, put together from their pieces."""
        request = urllib.request.Request(
            self.url + path,
            data=json.dumps({**body, "stream": True}).encode(),
            headers={"Content-Type": "application/json"},
        )
        choices: dict[int, dict[str, Any]] = {}
        with urllib.request.urlopen(request, timeout=HANG_S) as response:
            events = [line[6:] for line in response if line.startswith(b"data: ")]
        assert events[-1].strip() == b"[DONE]"
        for event in events[:-1]:
            for piece in json.loads(event)["choices"]:
                made = choices.setdefault(piece["index"], {"text": "", "token_ids": []})
                made["text"] += piece.get("text") or piece.get("delta", {}).get("content") or ""
                made["token_ids"] += piece.get("token_ids") or []
                made["finish_reason"] = piece["finish_reason"]
        return [choices[index] for index in sorted(choices)]

    def logged(self, name: str) -> list[dict[str, Any]]:
        """What the request log says of the request."""

        def lines() -> list[str]:
            return [line for line in self.process.output.splitlines() if f'"{name}"' in line]

        wait_until(lambda: bool(lines()))
        return [json.loads(line[line.index("{") :]) for line in lines()]


@pytest.fixture(scope="module")
def gateways(
    case: Case, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[tuple[str, str], Gateway]]:
    """By engine and route. A `remote` one has its prefill node in another cluster, a `local` one in
    the decode node's."""
    folder = tmp_path_factory.mktemp("parameters")
    pair = case.pair
    with ExitStack() as stack:
        options = ("--model", str(case.model.directory))
        names = ("prefill", "decode")
        hosts = stack.enter_context(running_hosts(folder, dict.fromkeys(names, options)))
        places = {
            "vllm": [
                {"url": pair.prefill.url, "kvd_url": pair.source.url},
                {"url": pair.decode.url, "kvd_url": pair.target.url},
            ],
            "node": [{"url": host.url, "kvd_url": host.kvd_url} for host in hosts],
        }
        made = {}
        for engine in ENGINES:
            prefill, decode = places[engine]
            for route in ROUTES:
                near = [decode] if route == "remote" else [prefill, decode]
                far = [prefill] if route == "remote" else []
                made[engine, route] = _started(
                    stack, folder / f"{engine}-{route}", case.model.directory, near, far, route
                )
        for gateway in made.values():
            gateway.process.wait_until_all_in_use()
        yield made


def _started(
    stack: ExitStack,
    folder: Path,
    tokenizer: Path,
    near: list[dict[str, str]],
    far: list[dict[str, str]],
    route: str,
) -> Gateway:
    made = deployment(near, far or near[:1], prefill=len(near) - 1, policy=route)
    raw = msgspec.to_builtins(made)
    if not far:
        raw["clusters"], raw["links"] = raw["clusters"][:1], []
    raw["model"]["max_tokens"] = 4096
    folder.mkdir()
    process = stack.enter_context(
        gateway_process(folder, raw, "--advise", tokenizer=str(tokenizer))
    )
    return Gateway(process, process.url)


@pytest.fixture(scope="module")
def plain(case: Case) -> dict[str, Plain]:
    """By path: the answer of vLLM without any of the parameters."""
    found = {}
    for path, said in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
    ):
        (choice,) = _of_vllm(case, path, {**BASE, **said})["choices"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        found[path] = Plain(choice["token_ids"], text)
    return found


def _of_vllm(case: Case, path: str, body: dict[str, Any]) -> Any:
    """vLLM alone, without anything that is cached."""
    asked = {**body, "model": "m", "cache_salt": secrets.token_hex(8)}
    answer = case.pair.decode.post(path, asked)
    assert answer.status == 200, answer.body
    return answer.body


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in OFTEN else pytest.mark.grid) for name in COMPLETIONS],
)
def test_completions(
    case: Case,
    gateways: dict[tuple[str, str], Gateway],
    plain: dict[str, Plain],
    name: str,
) -> None:
    path = "/v1/completions"
    body = {**BASE, "prompt": PROMPT, **COMPLETIONS[name](plain[path])}
    if name.startswith("echo"):
        # vLLM echoes no text beside token ids, and of bytes that are no character another one.
        body |= {"prompt": MESSAGES[0]["content"], "return_token_ids": None}
    _check_everywhere(case, gateways, path, body, name)


@pytest.mark.parametrize("name", CHATS)
def test_chats(
    case: Case,
    gateways: dict[tuple[str, str], Gateway],
    plain: dict[str, Plain],
    name: str,
) -> None:
    """Offloaded only: gateways serve both endpoints in the same way."""
    path = "/v1/chat/completions"
    body = {**BASE, "messages": MESSAGES, **CHATS[name](plain[path])}
    offloaded = {way: gateway for way, gateway in gateways.items() if way[1] == "remote"}
    _check_everywhere(case, offloaded, path, body, name)


def test_lists_of_prompts(case: Case, gateways: dict[tuple[str, str], Gateway]) -> None:
    prompts = [PROMPTS["edges"][0], PROMPTS["edges"][1], PROMPT]
    body = {**BASE, "prompt": prompts, "temperature": 1.0, "top_k": 1, "n": 2}
    _check_everywhere(case, gateways, "/v1/completions", body, "lists")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "Why? \u00e9", "return_token_strs": True}),
        ("/tokenize", {"messages": MESSAGES}),
        ("/detokenize", {"tokens": [87, 104, 121, 63]}),
    ],
)
def test_tokens_and_texts(
    case: Case, gateways: dict[tuple[str, str], Gateway], path: str, body: dict[str, Any]
) -> None:
    expected = case.pair.decode.post(path, {"model": "m", **body})
    assert expected.status == 200, expected.body
    for gateway in gateways.values():
        status, answer = gateway.post(path, {"model": MODEL, **body}, secrets.token_hex(8))
        assert status == 200, answer
        for field in ("count", "tokens", "token_strs", "prompt"):
            assert answer.get(field) == expected.body.get(field), field


def test_seeds_are_reproducible(gateways: dict[tuple[str, str], Gateway]) -> None:
    """vLLM 0.32 ends on a CPU when a request has a seed: "CPU Generator does not use offset"."""
    body = {**BASE, "prompt": PROMPT, "temperature": 1.0, "seed": 7, "n": 2}
    for gateway in (gateways["node", route] for route in ROUTES):
        answers = []
        for _ in range(2):
            salted = {**body, "cache_salt": secrets.token_hex(8)}
            status, answer = gateway.post("/v1/completions", salted, secrets.token_hex(8))
            assert status == 200, answer
            answers.append(sorted((c["index"], c["token_ids"]) for c in answer["choices"]))
        assert answers[0] == answers[1]
        assert answers[0][0][1] != answers[0][1][1], "two continuations with one seed"


@pytest.mark.parametrize(
    "fields",
    [{"best_of": 3}, {"no_such_field": 1}, {"min_p": 5.0}, {"n": 100_000}, {"n": 2}],
    ids=lambda fields: json.dumps(fields),
)
def test_refusals_name_the_field(
    gateways: dict[tuple[str, str], Gateway], fields: dict[str, Any]
) -> None:
    """Before anything is computed. Greedy continuations would all be the same (`n`)."""
    (field,) = fields
    for (engine, _), gateway in gateways.items():
        name = secrets.token_hex(8)
        asked = {**BASE, "prompt": PROMPT, "cache_salt": secrets.token_hex(8), **fields}
        status, answer = gateway.post("/v1/completions", asked, name)
        assert status == 400 and field in json.dumps(answer), (engine, status, answer)
        (line,) = gateway.logged(name)
        assert line["form"] == "" and line["outcome"] == "rejected"  # nothing was granted


# Comparing ----------------------------------------------------------------------------------------


def _check_everywhere(
    case: Case,
    gateways: dict[tuple[str, str], Gateway],
    path: str,
    body: dict[str, Any],
    name: str,
) -> None:
    body = {field: value for field, value in body.items() if value is not None}
    expected = _of_vllm(case, path, body)
    wrong = []
    for way, gateway in gateways.items():
        request = secrets.token_hex(8)
        asked = {**body, "cache_salt": secrets.token_hex(8)}
        status, answer = gateway.post(path, asked, request)
        if status != 200:
            wrong.append((way, status, answer))
            continue
        problem = _difference(expected, answer)
        if problem:
            wrong.append((way, problem, ""))
        for line in gateway.logged(request):
            offloaded = way[1] == "remote" and name not in OF_THE_PROMPT
            attempts = line["attempts"] / len(line.get("prompts", [line]))
            if (line["route"] == "remote") != offloaded or attempts > 1:
                wrong.append((way, "the request log", line))
        if name == "prompt_logprobs" or way[1] == "local":
            continue  # vLLM does not stream them; a stream of a local route is no other one
        streamed = gateway.stream(path, {**asked, "cache_salt": secrets.token_hex(8)})
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        if streamed != [_as_streamed(choice) for choice in choices]:
            wrong.append((way, "as a stream", streamed))
    assert not wrong, "\n".join(map(str, wrong))


def _difference(expected: Any, found: Any) -> str:
    """Where two responses differ in what a client reads; empty: nowhere."""
    for usage in ("prompt_tokens", "completion_tokens"):
        if expected["usage"][usage] != found["usage"][usage]:
            return f"{usage}: {expected['usage'][usage]} and {found['usage'][usage]}"
    ours = sorted(found["choices"], key=lambda choice: choice["index"])
    if len(expected["choices"]) != len(ours):
        return f"{len(ours)} choices"
    for here, there in zip(expected["choices"], ours, strict=True):
        fields = ["index", "token_ids", "text", "message", "finish_reason"]
        if here["stop_reason"] not in ENDS:
            fields.append("stop_reason")
        for field in fields:
            if _said(here.get(field)) != _said(there.get(field)):
                return f"{field}: {here.get(field)!r} and {there.get(field)!r}"
        for field in ("logprobs", "prompt_logprobs"):
            problem = _unlike(here.get(field), there.get(field), field)
            if problem:
                return problem
    return _unlike(expected.get("prompt_logprobs"), found.get("prompt_logprobs"), "prompt_logprobs")


def _as_streamed(choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": choice["text"] if "text" in choice else choice["message"]["content"],
        "token_ids": choice.get("token_ids") or [],
        "finish_reason": choice["finish_reason"],
    }


def _said(value: Any) -> Any:
    """Of a message, its role and its content: vLLM adds fields that say nothing. vLLM leaves out
    bytes at the end that are no character; `prfaas node` shows them."""
    if isinstance(value, str):
        return value.rstrip("\ufffd")
    if not isinstance(value, dict):
        return value
    return {name: _said(item) for name, item in value.items() if item not in (None, [])}


def _unlike(expected: Any, found: Any, at: str) -> str:
    """Numbers are log-probabilities, unless they are whole. A rank far down depends on the order of
    additions."""
    if isinstance(expected, float) and isinstance(found, float | int):
        return "" if abs(expected - found) <= TOLERANCE else f"{at}: {expected} and {found}"
    if at.endswith(".rank") and isinstance(expected, int) and isinstance(found, int):
        return "" if abs(expected - found) <= expected // 10 else f"{at}: {expected} and {found}"
    if isinstance(expected, dict) and isinstance(found, dict):
        if expected.keys() != found.keys():
            return f"{at}: {sorted(expected)} and {sorted(found)}"
        parts = ((f"{at}.{name}", expected[name], found[name]) for name in expected)
    elif isinstance(expected, list) and isinstance(found, list) and len(expected) == len(found):
        pairs = zip(expected, found, strict=True)
        parts = ((f"{at}[{i}]", one, two) for i, (one, two) in enumerate(pairs))
    else:
        return "" if expected == found else f"{at}: {expected!r} and {found!r}"
    return next((problem for name, a, b in parts if (problem := _unlike(a, b, name))), "")
