"""Generated requests against running services: no response is a server error or violates the
published document, and none takes long.

`python -m tests.service.test_schemathesis EXAMPLES` runs the same with more examples per operation.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest

from prfaas.engine.checkpoint.tokenizer import save_tokenizer
from tests.gateway.backends import deployment, node
from tests.gateway.conftest import on_accelerators
from tests.gateway.processes import gateway_process
from tests.node.hosts import running_hosts

SERVICES = ("gateway", "node", "kvd")
MAX_TOKENS = 8192
EXAMPLES = 10  # of an operation, besides those for each limit in the document
SEED = 1
ANSWER_S = 30.0  # only a hang takes so long
RUN_S = 250.0
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",  # what violates the document is refused
    "unsupported_method",
    "allow_header_conformance",
    "ignored_auth",
)


@contextmanager
def running_services(folder: Path) -> Iterator[dict[str, str]]:
    """URLs of a gateway, of one of its three emulated nodes, and of that node's kvd."""
    save_tokenizer(folder, max_tokens=MAX_TOKENS)
    options = (
        *("--engine", "emulated", "--model", "case-study-1t"),
        *("--set", "node.emulated.byte_scale=1e-4", "--set", "node.emulated.time_scale=1e-3"),
        *("--set", f"node.tokenizer={folder}"),
    )
    with ExitStack() as stack:
        hosts = stack.enter_context(
            running_hosts(folder, on_accelerators(options, home=2), "--memory", "64MiB")
        )
        raw = msgspec.to_builtins(deployment([node(h) for h in hosts[:2]], [node(hosts[2])]))
        raw["model"]["max_tokens"] = MAX_TOKENS
        gateway = stack.enter_context(
            gateway_process(folder, raw, "--advise", tokenizer=str(folder))
        )
        gateway.wait_until_all_in_use()
        yield {"gateway": gateway.url, "node": hosts[0].url, "kvd": hosts[0].kvd_url}


def schemathesis(url: str, examples: int, *more: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "schemathesis.cli", "--no-color", "run", f"{url}/openapi.json"),
        *("--phases", "examples,coverage,fuzzing", "--checks", ",".join(CHECKS)),
        *("--request-timeout", str(ANSWER_S), "--max-examples", str(examples)),
        *("--suppress-health-check", "all", "--warnings", "off"),
        *("--continue-on-failure", "--no-shrink"),
        *more,
    ]
    # In a folder of its own: schemathesis writes files beside it.
    with tempfile.TemporaryDirectory() as folder:
        return subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            timeout=RUN_S if examples == EXAMPLES else None,
        )


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with running_services(tmp_path_factory.mktemp("services")) as urls:
        yield urls


@pytest.mark.slow
@pytest.mark.parametrize(
    "service", ["gateway", *(pytest.param(name, marks=pytest.mark.grid) for name in SERVICES[1:])]
)
def test_generated_requests_find_no_fault(services: dict[str, str], service: str) -> None:
    done = schemathesis(services[service], EXAMPLES, "--generation-deterministic")
    assert done.returncode == 0, done.stdout
    assert "No test cases" not in done.stdout


def main() -> None:
    examples = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder, running_services(Path(folder)) as urls:
        codes = []
        for service in SERVICES:
            seed = ("--seed", str(SEED), "--generation-database", "none")
            done = schemathesis(urls[service], examples, *seed)
            codes.append(done.returncode)
            sys.stdout.write(done.stdout)
    sys.exit(max(codes))


if __name__ == "__main__":
    main()
