"""The gateway's backend in this process, over hosts that are separate processes."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from prfaas.clock import MonotonicClock
from prfaas.config import Deployment, parse_deployment
from prfaas.gateway.backend import GatewayBackend, running
from prfaas.gateway.client.token_ids import TokenIds
from prfaas.gateway.request import GatewayRequest, RequestTrace
from prfaas.planner.problem import Problem
from prfaas.studies.problem_files import Study
from tests.node.hosts import Host
from tests.waiting import PATIENCE_S

HOME, FAR = "pd", "far"
THRESHOLD = 1000
MODEL = "case-study-1t"
_NUMBERS = count()


def deployment(
    home: Sequence[dict[str, str]],
    far: Sequence[dict[str, str]],
    *,
    prefill: int = 1,
    links: Sequence[dict[str, Any]] = (),
    **scheduler: Any,
) -> Deployment:
    """`home`: nodes of the PD cluster, of which `prefill` prefill. `links`: beside the one home."""
    raw: dict[str, Any] = {
        "model": {"name": MODEL},
        "workload": {
            "kind": "lognormal",
            **{"mu": 7.0, "sigma": 1.0, "min_tokens": 128, "max_tokens": 131072},
            "output_tokens": 64,
        },
        "slo": {"output_tokens_per_s": 40},
        "clusters": [
            {
                **{"name": HOME, "kind": "pd", "accelerator": "h20", "gpus": 8 * len(home)},
                **{"gpus_per_instance": 8, "prefill": prefill, "decode": len(home) - prefill},
                "nodes": list(home),
            },
            {
                **{"name": FAR, "kind": "prfaas", "accelerator": "h200", "gpus": 8 * len(far)},
                **{"gpus_per_instance": 8, "nodes": list(far)},
            },
        ],
        "links": [{"from": FAR, "to": HOME, "gbps": 10, "rtt_ms": 1}, *links],
        "scheduler": {"policy": "paper", "threshold_tokens": THRESHOLD, **scheduler},
    }
    return parse_deployment(raw, "test.toml")


def written(raw: dict[str, Any], path: Path) -> Path:
    """A deployment's file."""
    path.write_text("".join(f"{name} = {_toml(value)}\n" for name, value in raw.items()))
    return path


def _toml(value: Any) -> str:
    """A value of a deployment, written into one line."""
    if isinstance(value, dict):
        pairs = (f"{key} = {_toml(item)}" for key, item in value.items() if item is not None)
        return f"{{ {', '.join(pairs)} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return json.dumps(value)


@cache
def _study() -> Study:
    """It keeps the catalog and the workload, which take longer to read than most tests do."""
    return Study(Path("test.toml"), "exact")


def problem(made: Deployment) -> Problem:
    study = Study(Path("test.toml"), "exact") if made.catalog else _study()
    return study.problem(made)


def node(host: Host) -> dict[str, str]:
    return {"url": host.url, "kvd_url": host.kvd_url}


@asynccontextmanager
async def serving(made: Deployment, *, nodes: int | None = None) -> AsyncIterator[GatewayBackend]:
    """A backend whose nodes are all in use."""
    wanted = sum(len(cluster.nodes) for cluster in made.clusters) if nodes is None else nodes
    async with running(made, problem(made)) as backend:
        await until(lambda: len(in_use(backend)) == wanted)
        yield backend


def in_use(backend: GatewayBackend) -> list[dict[str, Any]]:
    return [n for c in backend.state()["clusters"] for n in c["nodes"] if n.get("in_use")]


def with_role(backend: GatewayBackend, role: str, cluster: str = HOME) -> list[str]:
    (found,) = [c for c in backend.state()["clusters"] if c["cluster"] == cluster]
    return [n["node"] for n in found["nodes"] if n.get("role") == role]


async def until(condition: Callable[[], bool]) -> None:
    """For what has no event to wait on."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if condition():
                return
            await asyncio.sleep(0.01)


def prompt(tokens: int, seed: int | str = 0) -> list[int]:
    return random.Random(f"{tokens} {seed}").choices(range(32, 127), k=tokens)


def gateway_request(
    ids: list[int], max_tokens: int = 4, *, stream: bool = True, **more: Any
) -> GatewayRequest:
    fields = {
        "model": MODEL,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "return_token_ids": True,
        "stream": stream,
        **({"stream_options": {"include_usage": True}} if stream else {}),
    }
    more = {"salt": "", "conversation": False, **more}
    name = f"test-{next(_NUMBERS)}"
    return GatewayRequest(name, "/v1/completions", TokenIds.of(ids), fields, stream=stream, **more)


@dataclass(slots=True)
class Answered:
    trace: RequestTrace
    tokens: list[int] = field(default_factory=list)


async def answered(backend: GatewayBackend, asked: GatewayRequest) -> Answered:
    """All of an answer."""
    found = Answered(RequestTrace(MonotonicClock().now()))
    async with backend.answer(asked, found.trace) as upstream:
        async for together in upstream.events():
            found.tokens += [token for event in together for token in tokens_of(event)]
    return found


def tokens_of(event: bytes) -> list[int]:
    data = event.removeprefix(b"data: ").strip()
    if data == b"[DONE]":
        return []
    return [token for choice in json.loads(data)["choices"] for token in choice["token_ids"]]


def moved(backend: GatewayBackend, why: str) -> tuple[int, int]:
    """Copies of prefixes that were made, and that failed."""
    found = backend.state()["moves"][why]
    return found["made"], found["failed"]


async def until_it_would_resume(
    backend: GatewayBackend, asked: GatewayRequest, tokens: int
) -> None:
    """Cache events have come."""
    await until(lambda: backend.explain(asked)["chosen"].get("cached_tokens") == tokens)


def is_clean(backend: GatewayBackend) -> bool:
    """Nothing of ours is booked anywhere."""
    view = backend.fleet.board.view(0.0, {}, {})
    nodes = [n for cluster in (view.local, *view.remotes) for n in cluster.nodes]
    return (
        all(n.queued == 0 and n.active == 0 for n in nodes)
        and all(link.pending_bytes == 0 for link in view.links.values())
        and backend.state()["requests"]["in_flight"] == 0
    )
