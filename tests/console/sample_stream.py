"""A deployment that does not exist, for looking at the live page:

    python -m tests.console.sample_stream 8123 [--nodes 200]

Five minutes of it are sent at once, so that the charts are full, and then one second per second.
The story repeats: the link from north to west is congested for a while, then cut, and comes back; a
node is lost; a node changes its role.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prfaas.console.page import asset, live_page
from prfaas.scheduler.adaptive import LEAST_COST

Json = dict[str, Any]
HISTORY_S = 300
PERIOD_S = 240  # of the story
GIB = 1 << 30


class SampleDeployment:
    def __init__(self, nodes: int, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._start_s = time.time() - HISTORY_S
        self._at = 0
        self._ids = 0
        self._event_ids = 0
        self._backlogs = {"north -> west": 0.0, "north -> east": 0.0}
        self._totals: dict[str, Json] = {home: {} for home in ("west", "east")}
        self._ttft = dict.fromkeys(("wait_s", "prefill_s", "transfer_s", "decode_s"), 0.0)
        self._first_tokens = 0
        share = max(1, nodes // 4)
        self._sizes = {"north": share, "west": max(2, nodes - 2 * share), "east": max(2, share)}

    @property
    def now_s(self) -> float:
        return self._start_s + self._at

    def _phase(self) -> str:
        within = self._at % PERIOD_S
        return "congested" if 60 <= within < 110 else "cut" if 110 <= within < 140 else "clear"

    def _node(self, cluster: str, number: int) -> Json:
        size = self._sizes[cluster]
        prefills = cluster == "north" or number < size * 0.4
        wave = 0.5 + 0.4 * math.sin(self._at / 20 + number)
        node: Json = {
            "id": f"http://{cluster}-{number}:8100",
            "name": f"{cluster}-{number}",
            "role": "prefill" if prefills else "decode",
            "active": int(prefills) if prefills else int(64 * wave),
            "slots": 0 if prefills else 64,
            "queued": int(5 * wave) if prefills else 0,
            "wait_s": round(8 * wave, 2) if prefills else 0.0,
            "used_bytes": int(40 * GIB * wave),
            "evictable_bytes": int(20 * GIB),
            "capacity_bytes": 80 * GIB,
        }
        if cluster == "east" and number == 1 and self._at % PERIOD_S > 150:
            node |= {"status": "lost", "why": "its kvd does not answer: connection refused"}
        if cluster == "west" and number == 0 and 30 < self._at % PERIOD_S < 60:
            node |= {"status": "drains", "becomes": "decode"}
            node["why"] = "it finishes its requests before it changes its role"
        return node

    def _link(self, target: str) -> Json:
        name = f"north -> {target}"
        phase = self._phase() if target == "west" else "clear"
        growth = {"clear": -2e9, "congested": 2e8, "cut": 1e8}[phase]
        backlog = min(max(2e7, self._backlogs[name] + growth), 9e9)
        self._backlogs[name] = backlog
        wave = 0.5 + 0.3 * math.sin(self._at / 13 + len(target))
        rate = {"clear": 40e9 * wave, "congested": 21e9, "cut": 0.0}[phase]
        return {
            "source": "north",
            "target": target,
            "verdict": phase,
            "cause": {"clear": "", "congested": "its queue grows", "cut": "no bytes arrive"}[phase],
            "capacity_bps": 100e9 if target == "west" else 40e9,
            "rate_bps": rate,
            "backlog_bytes": int(backlog),
            "waited_s": 0.0 if phase == "clear" else round(backlog / 2.6e9, 2),
            "rtt_s": 0.021,
            "lost_segments": 12 if phase == "congested" else 0,
        }

    def _request(self, home: str) -> Json:
        chosen = self._random
        self._ids += 1
        prompt = int(chosen.lognormvariate(9.5, 1.0))
        cached = int(prompt * chosen.choice([0, 0, 0.3, 0.8]))
        remote = prompt - cached > 18_000 and not (home == "west" and self._phase() == "cut")
        parts = {
            "wait_s": chosen.expovariate(3),
            "prefill_s": (prompt - cached) / (30_000 if remote else 9_000),
            "transfer_s": chosen.uniform(0.1, 0.9) if remote else 0.02,
            "decode_s": chosen.uniform(0.02, 0.08),
        }
        source = "north" if remote else home
        return {
            "id": f"req-{self._ids:06d}",
            "at_s": self.now_s - sum(parts.values()) - 1,
            "home": home,
            "route": "remote" if remote else "local",
            "outcome": "completed" if chosen.random() > 0.02 else "failed",
            "reason": LEAST_COST,
            "prefill": f"{source}-0",
            "decode": f"{home}-{self._sizes[home] - 1}",
            "prompt_tokens": prompt,
            "cached_tokens": cached,
            "output_tokens": chosen.randrange(20, 900),
            "nbytes": prompt * 20_000,
            "ttft_s": sum(parts.values()),
            **parts,
            "total_s": sum(parts.values()) + 1,
        }

    def _count(self, request: Json) -> None:
        totals = self._totals[request["home"]]
        key = "failed" if request["outcome"] == "failed" else request["route"]
        lost = int(request["prompt_tokens"] * 0.06)
        counted = {key: 1, "stateless_tokens": lost}
        for name in ("prompt_tokens", "cached_tokens"):
            counted[name] = request[name]
        for name, number in counted.items():
            totals[name] = totals.get(name, 0) + number
        self._first_tokens += 1
        for name in self._ttft:
            self._ttft[name] += request[name]

    def _home(self, cluster: str) -> Json:
        factor = 1.6 if cluster == "west" and self._phase() != "clear" else 1.0
        return {
            "cluster": cluster,
            "has_plan": True,
            "threshold_tokens": 18_400 * factor,
            "planned_threshold_tokens": 18_400,
            "planned_rps": 6.0,
            "planned_share": 0.34,
            "plan_reason": "the deployment's stated traffic",
            "waiting": 3 if cluster == "west" and self._phase() == "cut" else 0,
            **self._totals[cluster],
        }

    def _events(self) -> list[Json]:
        moments = {
            5: ("plan", "The plan of west has a new threshold: 18,400 tokens.", "west"),
            31: ("role", "Node west-0 drains to become a decode node.", "west-0"),
            60: ("link", "The link north -> west is congested: its queue grows.", "north -> west"),
            75: ("move", "A prefix of 12,288 tokens is copied from west-1 to west-2.", "west-2"),
            110: ("link", "The link north -> west is cut.", "north -> west"),
            140: ("link", "The link north -> west is clear again.", "north -> west"),
            151: ("node", "Node east-1 is lost: connection refused.", "east-1"),
        }
        found = moments.get(self._at % PERIOD_S)
        if found is None:
            return []
        self._event_ids += 1
        kind, text, where = found
        event = {"id": self._event_ids, "at_s": self.now_s, "kind": kind}
        return [{**event, "text": text, "where": where}]

    def scene(self) -> Json:
        kinds = {"north": "prfaas", "west": "pd", "east": "pd"}
        return {
            "at_s": self.now_s,
            "model": "kimi-linear-48b",
            "policy": "adaptive",
            "clusters": [
                {
                    "name": name,
                    "kind": kinds[name],
                    "nodes": [self._node(name, i) for i in range(n)],
                }
                for name, n in self._sizes.items()
            ],
            "links": [self._link("west"), self._link("east")],
            "homes": [self._home("west"), self._home("east")],
            "ttft": {"first_tokens": self._first_tokens, **self._ttft},
            "in_flight": 40 + int(10 * math.sin(self._at / 7)),
        }

    def delta(self) -> Json:
        """The next second."""
        self._at += 1
        requests = [self._request(home) for home in ("west", "west", "east") for _ in range(3)]
        for request in requests:
            self._count(request)
        scene = self.scene()
        nodes = {c["name"]: {n["id"]: n for n in c["nodes"]} for c in scene.pop("clusters")}
        return {**scene, "nodes": nodes, "events": self._events(), "requests": requests}


def explanation(request: Json) -> Json:
    option = {"copies": 0, "alone": False, "form": "native"}
    names = ("wait_s", "prefill_s", "transfer_s", "decode_s")
    taken = {name: request[name] for name in names}
    other = {"wait_s": 3.1, "prefill_s": 4.2, "transfer_s": 0.02, "decode_s": 0.05}
    cluster = request["prefill"].partition("-")[0]
    beside = request["home"] if cluster == "north" else "north"
    cached = request["cached_tokens"]
    return {
        "chosen": {
            "wait": False,
            "cluster": cluster,
            "prefill": request["prefill"],
            "decode_cluster": request["home"],
            "decode": request["decode"],
            "offloaded": cluster == "north",
            "cached_tokens": cached,
            "nbytes": request["nbytes"],
            "reason": request["reason"],
            "copies": [],
            "form": "native",
        },
        "threshold_tokens": 18_400,
        "alternatives": [
            {
                "cluster": cluster,
                "node": request["prefill"],
                "cached_tokens": cached,
                **option,
                **taken,
            },
            {"cluster": beside, "node": f"{beside}-1", "cached_tokens": 0, **option, **other},
        ],
    }


class Handler(BaseHTTPRequestHandler):
    nodes = 12
    latest: dict[str, Json] = {}

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/":
            page = live_page("prfaas")
            self._answer(page.html.encode(), {**page.headers, "Content-Type": "text/html"})
        elif path == "/console/stream":
            self._stream()
        elif path.startswith("/console/requests/"):
            request = self.latest.get(path.rpartition("/")[2])
            if request is None:
                self.send_error(404)
                return
            found = {"request": request, "explanation": explanation(request), "failures": []}
            self._answer(json.dumps(found).encode(), {"Content-Type": "application/json"})
        elif (found_asset := asset(path.rpartition("/")[2])) is not None:
            self._answer(found_asset.content, {"Content-Type": found_asset.content_type})
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        """The prompt box: an answer for any prompt, by way of the latest request."""
        length = int(self.headers.get("Content-Length", 0))
        self.rfile.read(length)
        request = list(self.latest.values())[-1]
        if self.path.endswith("/explain"):
            found = json.dumps(explanation(request)).encode()
            self._answer(found, {"Content-Type": "application/json"})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("X-Request-Id", request["id"])
        self.end_headers()
        for word in "Tokens <b>are text</b>, whatever a model writes. ".split(" ") * 8:
            chunk = json.dumps({"choices": [{"text": f"{word} "}]})
            self.wfile.write(f"data: {chunk}\n\n".encode())
            time.sleep(0.02)
        self.wfile.write(b"data: [DONE]\n\n")

    def _answer(self, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for event, message in self._messages():
            text = f"event: {event}\ndata: {json.dumps(message)}\n\n"
            self.wfile.write(text.encode())

    def _messages(self) -> Iterator[tuple[str, Json]]:
        deployment = SampleDeployment(self.nodes)
        yield "scene", {"scene": deployment.scene(), "events": [], "requests": [], "tenants": []}
        for second in range(1_000_000):
            delta = deployment.delta()
            self.latest.update((request["id"], request) for request in delta["requests"])
            yield "delta", delta
            if second >= HISTORY_S:
                time.sleep(1)

    def log_message(self, format: str, *args: object) -> None:
        """The address of each asset is of no interest."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--nodes", type=int, default=Handler.nodes)
    given = parser.parse_args()
    Handler.nodes = given.nodes
    ThreadingHTTPServer(("127.0.0.1", given.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
