"""A small system as a user starts it: a checkpoint with a tokenizer and a chat template, a PrfaaS
cluster of one node, a PD cluster of one prefill and one decode node, and a gateway.

The gateway offloads every prompt, so the prefill node of the PD cluster has nothing to do. Tests
ask it directly for answers of a single engine, and compare answers through the gateway with them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prfaas.engine.checkpoint.make import make_checkpoint
from tests.gateway.processes import GatewayProcess, gateway_process
from tests.node.hosts import Host, running_hosts
from tests.waiting import wait_until

MODEL = "tiny-kimi"
MAX_TOKENS = 32768  # of the checkpoint
CLUSTERS = {"pd": ["pd0", "pd1"], "far": ["far0"]}
PROFILE = f"""\
[[accelerators]]
name = "cpu"
title = "CPU"

[[profiles]]
model = "{MODEL}"
accelerator = "cpu"
gpus = 1
status = "inferred"
source = "made up for tests"
prefill = [{{ new = 64, seconds = 0.1 }}, {{ new = 4096, seconds = 2.0 }}]
decode = [{{ batch = 1, step_s = 0.02 }}, {{ batch = 8, step_s = 0.04 }}]
"""


class Target(NamedTuple):
    """What a client needs to know of a server."""

    url: str  # without /v1
    model: str
    tokenizer: Path  # a folder that transformers can load


class System:
    def __init__(self, gateway: GatewayProcess, single_node: str, checkpoint: Path) -> None:
        self.gateway = Target(gateway.url, MODEL, checkpoint)
        self.single_node = Target(single_node, MODEL, checkpoint)
        self._process = gateway
        self._read_lines = 0

    def new_outcomes(self, prompts: int) -> Counter[tuple[str, str]]:
        """Routes and outcomes of the prompts that the gateway has logged since the last call. Waits
        for this number of them: a client may receive its response before the line is written."""

        def found() -> list[tuple[str, str]]:
            lines = self._process.output.splitlines()[self._read_lines :]
            return [one for line in lines for one in _routes_and_outcome(line)]

        wait_until(lambda: len(found()) >= prompts)
        new = Counter(found())
        self._read_lines = len(self._process.output.splitlines())
        return new


def _routes_and_outcome(line: str) -> list[tuple[str, str]]:
    """Of each prompt of the request that a line of the gateway's log is about."""
    start = line.find('{"id":')
    if start < 0:
        return []
    request = json.loads(line[start:])
    return [(one["route"], request["outcome"]) for one in request.get("prompts", [request])]


@contextmanager
def running_system(folder: Path) -> Iterator[System]:
    checkpoint = folder / MODEL
    make_checkpoint(checkpoint, "kimi-linear")
    options = ("--model", str(checkpoint), "--device", "cpu")
    with ExitStack() as stack:
        names = [name for names in CLUSTERS.values() for name in names]
        started = stack.enter_context(running_hosts(folder, dict.fromkeys(names, options)))
        hosts = dict(zip(names, started, strict=True))
        made = _deployment(folder, checkpoint, hosts)
        gateway = stack.enter_context(gateway_process(folder, made, tokenizer=str(checkpoint)))
        gateway.wait_until_all_in_use()
        (idle,) = [node["node"] for node in gateway.in_use("pd") if node["role"] == "prefill"]
        yield System(gateway, hosts[idle].url, checkpoint)


def _deployment(folder: Path, checkpoint: Path, hosts: dict[str, Host]) -> dict[str, Any]:
    (folder / "catalog.toml").write_text(PROFILE)
    return {
        "catalog": ["catalog.toml"],
        "model": {
            **{"name": MODEL, "config": str(checkpoint / "config.json")},
            "max_tokens": MAX_TOKENS,
        },
        "workload": {
            **{"kind": "lognormal", "mu": 6.0, "sigma": 1.0, "min_tokens": 16},
            **{"max_tokens": 8192, "output_tokens": 64},
        },
        "slo": {"output_tokens_per_s": 20},
        "clusters": [
            {
                **{"name": name, "kind": "pd" if name == "pd" else "prfaas"},
                **({"prefill": 1, "decode": 1} if name == "pd" else {}),
                **{"accelerator": "cpu", "gpus": len(nodes), "gpus_per_instance": 1},
                "nodes": [{"url": hosts[n].url, "kvd_url": hosts[n].kvd_url} for n in nodes],
            }
            for name, nodes in CLUSTERS.items()
        ],
        "links": [{"from": "far", "to": "pd", "gbps": 10, "rtt_ms": 1}],
        "scheduler": {"policy": "remote"},
    }
