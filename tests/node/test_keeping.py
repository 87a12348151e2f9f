"""What a host keeps: prefixes outlive the memory they were in, and the engine they came from."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.node.conftest import EMULATED, hf_options
from tests.node.hosts import START_S, Host, cached_of, tokens_of

pytestmark = pytest.mark.timeout(2 * START_S)  # hosts start within it

BLOCK = 64
NEW_TOKENS = 4
OTHERS = 12  # prompts that push the first one out of memory


def prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(32, 127), k=4 * BLOCK + 10)


@pytest.fixture(params=["emulated", pytest.param("hf", marks=pytest.mark.grid)])
def host(request: pytest.FixtureRequest, tmp_path: Path, checkpoint: Callable[[str], Path]) -> Host:
    options = (
        (*EMULATED, "--set", "node.emulated.byte_scale=1e-3")
        if request.param == "emulated"
        else hf_options(checkpoint("kimi-linear"))
    )
    (tmp_path / "ssd").mkdir()
    kvd_options = (
        "--memory",
        "1MiB",
        "--ssd",
        str(tmp_path / "ssd"),
        "--set",
        "kvd.ssd_size=64MiB",
    )
    host = Host(tmp_path / "host", options, kvd_options)
    request.addfinalizer(host.close)
    return host


def test_a_prefix_on_ssd_and_one_of_an_engine_before_are_served(host: Host) -> None:
    def answer(seed: int, salt: str = "") -> tuple[list[int], int]:
        answer = host.complete(
            prompt(seed), max_tokens=NEW_TOKENS, ignore_eos=True, cache_salt=salt
        )
        return tokens_of(answer), cached_of(answer)

    expected, cached = answer(0)
    assert cached == 0
    for seed in range(1, OTHERS + 1):
        answer(seed)
    counters = host.stats()["pool"]["counters"]
    assert counters["spilled_blocks"] > 0 and counters["promoted_blocks"] == 0
    assert answer(0) == (expected, 4 * BLOCK)
    assert host.stats()["pool"]["counters"]["promoted_blocks"] > 0

    host.node.kill()
    host.wait_until_idle()
    host.begin_node()
    assert answer(0) == (expected, 4 * BLOCK)
    assert answer(0, salt="computed anew") == (expected, 0)
    host.wait_until_idle()
