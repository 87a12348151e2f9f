"""`prfaas gateway` as an operator starts it, asked by OpenAI's client, over hosts far and near."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from openai import OpenAI

from prfaas.text import Chat, load_tokenizer
from tests.gateway.backends import MODEL, THRESHOLD, prompt
from tests.gateway.conftest import Hosts
from tests.gateway.processes import GatewayProcess, gateway_process
from tests.node.hosts import START_S, Process, call
from tests.secret_files import write_secret
from tests.waiting import wait_until

OPERATOR = "the-operator-key-of-the-test"
SHORT = [{"role": "user", "content": "Why?"}]
LONG = [{"role": "user", "content": "Why? " * THRESHOLD}]


@pytest.fixture(scope="module")
def gateway(emulated: Hosts, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    folder = tmp_path_factory.mktemp("gateway")
    write_secret(folder / "key", "sk-from-a-file\n")
    write_secret(folder / "operator.key", f"{OPERATOR}\n")
    raw = msgspec.to_builtins(emulated.deployment())
    raw["model"]["max_tokens"] = 8192
    with gateway_process(
        folder,
        raw,
        "--advise",
        key=OPERATOR,
        tokenizer=str(emulated.tokenizer),
        operator_key_file="operator.key",
        keys=[{"file": "key", "tenant": "one"}, {"key": "sk-two", "tenant": "two"}],
    ) as process:
        yield process
        assert process.stop() == 0


@pytest.fixture
def url(gateway: GatewayProcess) -> str:
    gateway.wait_until_all_in_use()
    return gateway.url


def client(url: str, key: str = "sk-from-a-file") -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def lines(gateway: GatewayProcess, request: str) -> list[dict[str, Any]]:
    """What the log says of it, once it does."""

    def found() -> list[dict[str, Any]]:
        told = [line[line.index("{") :] for line in gateway.output.splitlines() if request in line]
        return [json.loads(line) for line in told]

    wait_until(lambda: bool(found()))
    return found()


@pytest.mark.parametrize(("messages", "route"), [(SHORT, "local"), (LONG, "remote")])
def test_chats_are_prefilled_where_they_belong(
    gateway: GatewayProcess, url: str, emulated: Hosts, messages: Any, route: str
) -> None:
    name = f"chat-{route}"
    with client(url) as asking:
        stream = asking.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers={"X-Request-Id": name},
        )
        *_, last = stream
    ids = load_tokenizer(emulated.tokenizer).encode_chat(Chat(messages))
    assert last.usage is not None and last.usage.prompt_tokens == len(ids)
    assert last.usage.prompt_tokens_details is not None
    (line,) = lines(gateway, name)
    # What the prefill has not computed, and not what the hand-off has brought.
    assert last.usage.prompt_tokens_details.cached_tokens == line["cached_tokens"]
    assert (line["outcome"], line["route"], line["tenant"]) == ("completed", route, "one")
    assert line["prompt_tokens"] == len(ids) and line["output_tokens"] == 3
    assert line["ttft_s"] > 0 and line["bytes"] > 0 and line["reason"]


def test_completions_and_who_may_ask(gateway: GatewayProcess, url: str) -> None:
    with client(url) as asking:
        answer = asking.completions.create(model=MODEL, prompt=prompt(300), max_tokens=5)
        assert answer.usage is not None and answer.usage.completion_tokens == 5
        with pytest.raises(openai.BadRequestError) as long:
            asking.completions.create(model=MODEL, prompt=[1] * 8192)
        assert long.value.code == "context_length_exceeded"
    with client(url, "sk-unknown") as stranger, pytest.raises(openai.AuthenticationError):
        stranger.completions.create(model=MODEL, prompt="x")
    assert call("GET", f"{url}/prfaas/v1/state", key="sk-two")[0] == 401


def test_tenants_share_no_cache(url: str) -> None:
    ids = prompt(700, seed=1)

    assert cached_tokens(url, "one", ids) == 0
    with client(url) as asking:
        asking.completions.create(model=MODEL, prompt=ids, max_tokens=1)
    wait_until(lambda: cached_tokens(url, "one", ids) >= 512)
    assert cached_tokens(url, "two", ids) == 0


def cached_tokens(url: str, tenant: str, ids: list[int]) -> int:
    """Tokens of the prompt that are cached on any node, for this tenant."""
    path = f"{url}/prfaas/v1/explain?tenant={tenant}"
    status, told = call("POST", path, {"prompt": ids}, OPERATOR)
    assert status == 200, told
    return max(option["cached_tokens"] for option in told["alternatives"])


def test_health_and_the_document_need_no_key(url: str) -> None:
    assert call("GET", f"{url}/health") == (200, {"status": "ok"})
    assert call("GET", f"{url}/openapi.json")[1]["openapi"].startswith("3.1")
    request = urllib.request.Request(
        f"{url}/metrics", headers={"Authorization": f"Bearer {OPERATOR}"}
    )
    with urllib.request.urlopen(request) as answer:
        page = answer.read().decode()
    for name in (
        "requests_total",
        'plan_threshold_tokens{cluster="pd"} 1000',
        'prefill_pace_ratio{cluster="pd"}',
    ):
        assert f"prfaas_gateway_{name}" in page, name


def test_a_gateway_that_advises_says_so(gateway: GatewayProcess, url: str) -> None:
    found = gateway.state()
    assert found["advises"] and found["advice"] is None and found["plan"]["made"]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ('keys = [{ file = "missing" }]', "missing: no such file"),
        ('keys = [{ tenant = "a" }]', "gateway.keys.0: exactly one of key and file is required"),
        ('tokenizer = "nowhere"', "tokenizer.json: no such file"),
        ('host = "203.0.113.1"', "--host: other hosts could reach 203.0.113.1"),
        ('host = "203.0.113.1"\ninsecure = true', "203.0.113.1:8080: cannot listen"),
    ],
)
def test_what_cannot_be_served_is_one_line(tmp_path: Path, section: str, says: str) -> None:
    published = Path("configs/case_study.toml").read_text()
    path = tmp_path / "deployment.toml"
    path.write_text(f"{published}\n[gateway]\n{section}\n")
    process = Process("gateway", str(path))
    assert process.popen.wait(START_S) == 2
    process.stop()
    assert says in process.output and process.output.count("\n") == 1
