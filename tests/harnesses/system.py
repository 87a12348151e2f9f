"""A small system as a user starts it: a checkpoint with a tokenizer and a chat template, a node that
prefills in a PrfaaS cluster, a node that decodes in a PD cluster, and a gateway. One node beside it
is for answers to compare with."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from prfaas.contracts.readiness import GatewayReady
from prfaas.engine.checkpoint.make import make_checkpoint
from prfaas.launch.request_outcomes import RequestOutcome, RequestOutcomes
from tests.gateway.backends import written
from tests.node.hosts import Host, Process, call
from tests.waiting import wait_until

MODEL = "tiny-kimi"
MAX_TOKENS = 32768  # of the checkpoint
CLUSTERS = (("pd", "pd"), ("far", "prfaas"))  # name and kind
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
    """What a client needs to know."""

    url: str  # without /v1
    model: str
    tokenizer: Path  # a folder that transformers can load


class System:
    def __init__(self, gateway: Process, alone: Host, checkpoint: Path) -> None:
        self.gateway = Target(gateway.ready(GatewayReady).http, MODEL, checkpoint)
        self.single_node = Target(alone.url, MODEL, checkpoint)
        self._process = gateway
        self._seen = 0

    def new_outcomes(self, requests: int) -> list[RequestOutcome]:
        """The lines that the gateway has logged about requests since the last call. Waits for
        `requests` of them: a client may receive its response before the line is written."""

        def found() -> list[RequestOutcome]:
            outcomes = RequestOutcomes()
            for line in self._process.output.splitlines():
                outcomes.read_line(line)
            return list(outcomes.latest)[self._seen :]

        wait_until(lambda: len(found()) >= requests)
        new = found()
        self._seen += len(new)
        return new


def count_outcomes(outcomes: list[RequestOutcome]) -> Counter[tuple[str, str]]:
    """By route and outcome."""
    return Counter((one.route, one.outcome) for one in outcomes)


@contextmanager
def running_system(folder: Path) -> Iterator[System]:
    checkpoint = folder / MODEL
    make_checkpoint(checkpoint, "kimi-linear")
    options = ("--model", str(checkpoint), "--device", "cpu")
    with ExitStack() as stack:
        hosts = {}
        for name in (*(name for name, _ in CLUSTERS), "alone"):
            hosts[name] = Host(folder / name, options, ("--node", name))
            stack.callback(hosts[name].close)
        for host in hosts.values():
            host.wait_until_ready()
        gateway = Process("gateway", str(_deployment_file(folder, checkpoint, hosts)))
        stack.callback(gateway.stop)
        _wait_for_nodes(gateway.ready(GatewayReady).http)
        yield System(gateway, hosts["alone"], checkpoint)


def _deployment_file(folder: Path, checkpoint: Path, hosts: dict[str, Host]) -> Path:
    """Policy `remote` offloads every prompt that is long enough for a hand-off."""
    (folder / "catalog.toml").write_text(PROFILE)
    raw: dict[str, Any] = {
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
                **{"name": name, "kind": kind, "accelerator": "cpu", "gpus": 1},
                **({"prefill": 0, "decode": 1} if kind == "pd" else {}),
                "gpus_per_instance": 1,
                "nodes": [{"url": hosts[name].url, "kvd_url": hosts[name].kvd_url}],
            }
            for name, kind in CLUSTERS
        ],
        "links": [{"from": "far", "to": "pd", "gbps": 10, "rtt_ms": 1}],
        "scheduler": {"policy": "remote"},
        "gateway": {"port": 0, "tokenizer": str(checkpoint)},
    }
    return written(raw, folder / "deployment.toml")


def _wait_for_nodes(url: str) -> None:
    def ready() -> bool:
        status, state = call("GET", f"{url}/prfaas/v1/state")
        assert status == 200, json.dumps(state)
        return all(node.get("in_use") for c in state["clusters"] for node in c["nodes"])

    wait_until(ready)
