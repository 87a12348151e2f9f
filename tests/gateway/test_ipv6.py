"""A deployment whose services listen on IPv6 addresses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from tests.gateway.backends import MODEL, THRESHOLD, deployment, node, prompt
from tests.gateway.conftest import QUICK, on_accelerators
from tests.gateway.processes import gateway_process
from tests.node.hosts import running_hosts


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback address; containers often have none."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_a_long_prompt_is_handed_off_over_ipv6(tmp_path: Path) -> None:
    listening = ("--listen", "[::1]:0", "--http", "[::1]:0")
    options = on_accelerators((*QUICK, "--host", "::1"), home=2)
    with running_hosts(tmp_path, options, *listening) as hosts:
        for host in hosts:
            assert host.url.startswith("http://[::1]:")
            assert host.stats(check=False)["data_address"].startswith("[::1]:")
        made = deployment([node(host) for host in hosts[:2]], [node(hosts[2])])
        with gateway_process(tmp_path, made, host="::1") as gateway:
            assert gateway.url.startswith("http://[::1]:")
            gateway.wait_until_all_in_use()
            body = {"model": MODEL, "prompt": prompt(2 * THRESHOLD), "max_tokens": 2}
            answer = gateway.ask("POST", "/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 2
        committed = [host.stats(check=False)["arrivals"]["committed"] for host in hosts]
        assert sum(committed) == 1
