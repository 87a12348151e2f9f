from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prfaas.engine.checkpoint.make import make_checkpoint
from tests.node.hosts import Gateway, Host

EMULATED = (
    *("--engine", "emulated", "--model", "case-study-1t"),
    *("--accelerator", "h20", "--set", "node.emulated.byte_scale=1e-4"),
    *("--set", "node.emulated.time_scale=0.1"),
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def checkpoint(arch: str) -> Path:
        if arch not in made:
            made[arch] = tmp_path_factory.mktemp("models") / arch
            make_checkpoint(made[arch], arch)
        return made[arch]

    return checkpoint


def hf_options(model: Path) -> tuple[str, ...]:
    return ("--model", str(model), "--set", "node.chunk_tokens=128", "--device", "cpu")


@pytest.fixture(scope="session")
def start_pair(
    checkpoint: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], Gateway]]:
    """Two hosts with the same model and a gateway between them, started once."""
    pairs: dict[str, Gateway] = {}
    hosts: list[Host] = []

    def start(arch: str) -> Gateway:
        if arch not in pairs:
            options = hf_options(checkpoint(arch))
            pair = [Host(tmp_path_factory.mktemp(name), options) for name in ("p", "d")]
            hosts.extend(pair)
            pairs[arch] = Gateway(*pair)
        # Also when a test before has waited in vain: more of them would not start sooner.
        for host in (pairs[arch].prefill_host, pairs[arch].decode_host):
            host.wait_until_ready()
        return pairs[arch]

    yield start
    for host in hosts:
        host.close()


@pytest.fixture(params=["kimi-linear", pytest.param("mimo", marks=pytest.mark.grid)])
def pair(request: pytest.FixtureRequest, start_pair: Callable[[str], Gateway]) -> Gateway:
    return start_pair(request.param)


@pytest.fixture
def kimi(start_pair: Callable[[str], Gateway]) -> Gateway:
    """For what does not depend on the kinds of state."""
    return start_pair("kimi-linear")


def start_hosts(
    folder: Path, options: tuple[str, ...], *decode_kvd: str, prefill_kvd: tuple[str, ...] = ()
) -> Iterator[Gateway]:
    hosts = [Host(folder / "p", options, prefill_kvd), Host(folder / "d", options, decode_kvd)]
    try:
        for host in hosts:
            host.wait_until_ready()
        yield Gateway(*hosts)
    finally:
        for host in hosts:
            host.close()


@pytest.fixture(scope="session")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """Two hosts whose engine checks every byte it resumes from."""
    yield from start_hosts(tmp_path_factory.mktemp("emulated"), EMULATED)
