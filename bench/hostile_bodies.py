"""Streams through a gateway, while clients send it request bodies that are made to stop it.

\b
    python bench/hostile_bodies.py [--seconds 30] [--clients 8]

A real `prfaas gateway` serves streams from null nodes, which send an event every 20 ms. Meanwhile
the clients send, in a loop, bodies of up to 60 MB: lists of lists, deep nesting, long numbers,
500,000 fields, a long text, a chat of many messages, gzip bombs. With `--accepted` they send
requests that are served instead: a million token ids, and a chat with an image of 59 MB. Prints
JSON:

\b
  lag_ms        event-loop lag of the gateway, as its own probe measures it every 10 ms: upper
                bounds of p50 and p99, and the largest; `before` is without hostile clients. `own`
                is the part of it in which the gateway itself used the CPU: on a busy machine the
                rest is the time of other processes
  memory_mb     peak RSS of the gateway and of each body worker, most bytes of bodies, and bounds
  streams       events, streams broken (must be 0) and the largest gap between two events in ms
  answers       by kind of body and status
  held          whether p99 < 50 ms, the largest < 200 ms, memory is bounded, and no stream broke
"""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import re
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from _processes import free_ports, process
from gateway import (
    DEPLOYMENT,
    MODEL,
    NODES,
    ready,
    requests_of,
)
from prfaas.engine.checkpoint.tokenizer import save_tokenizer
from prfaas.gateway.body_workers.pool import WORKERS, memory_bound

HERE = Path(__file__).parent
MB = 10**6
SIZE = 60 * MB
STREAMS = 20
TOKENS = 400  # of a stream
EVENT_S = 0.02
MAX_TOKENS = 1 << 20
BODIES_MB = 1024
GATEWAY_MB = 700  # the gateway itself, with buffers of sockets and the streams
P99_MS, MAX_MS = 50.0, 200.0


def hostile(size: int) -> dict[str, tuple[str, bytes, dict[str, str]]]:
    """Name -> path, body, headers."""
    completions, chats = "/v1/completions", "/v1/chat/completions"
    plain: dict[str, str] = {}
    packed = {"Content-Encoding": "gzip"}
    message = b'{"role":"user","content":"hello"},'
    model = b'"model":"%b"' % MODEL.encode()
    return {
        "lists": (completions, b'{"prompt":[1],"x":[' + b"[]," * (size // 3) + b"[]]}", plain),
        "lists of another model": (
            completions,
            b'{"model":"another","prompt":[1],"x":[' + b"[]," * (size // 3) + b"[]]}",
            plain,
        ),
        "few lists": (completions, b'{"prompt":[' + b"[]," * (size // 60) + b"[]]}", plain),
        "nesting": (completions, b'{"prompt":' + b"[" * size, plain),
        "digits as id": (completions, b'{"prompt":[' + b"1" * size + b"]}", plain),
        "digits as field": (completions, b'{"prompt":[1],"x":' + b"1" * size + b"}", plain),
        "fields": (
            completions,
            b"{%b%b}" % (model, b"".join(b',"k%d":%d' % (n, n) for n in range(500_000))),
            plain,
        ),
        "text": (completions, b'{"prompt":"' + b"x y " * (size // 4) + b'"}', plain),
        "chat": (chats, b'{"messages":[' + message * (size // len(message)) + b"{}]}", plain),
        "shorter chat": (
            chats,
            b'{"messages":[' + message * (size // len(message) // 4) + message[:-1] + b"]}",
            plain,
        ),
        "gzip bomb": (completions, gzip.compress(b"[" * size), packed),
        "gzip bomb of 1 GB": (completions, gzip.compress(b" " * 10**9, 1), packed),
        "broken gzip": (completions, gzip.compress(os.urandom(size // 10), 1)[:-100], packed),
    }


def accepted(tokens: int) -> dict[str, tuple[str, bytes, dict[str, str]]]:
    asked = {"model": MODEL, "prompt": [n * 7919 % 160_000 for n in range(tokens)]}
    body = json.dumps({**asked, "max_tokens": 8, "stream": True}, separators=(",", ":")).encode()
    image = {"type": "image_url", "image_url": {"url": "data:," + "x" * (SIZE - 10**6)}}
    chat = {"role": "user", "content": [{"type": "text", "text": "what?"}, image]}
    long = json.dumps({"model": MODEL, "messages": [chat], "max_tokens": 8, "stream": True})
    return {
        "ids": ("/v1/completions", body, {}),
        "image": ("/v1/chat/completions", long.encode(), {}),
    }


@dataclass(slots=True)
class Found:
    answers: Counter[str] = field(default_factory=Counter)
    events: int = 0
    streams: int = 0
    broken: list[str] = field(default_factory=list)
    gap_s: float = 0.0
    peak_mb: dict[str, float] = field(default_factory=dict)
    lag_max_s: dict[str, float] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


def attack(port: int, bodies: Any, first: int, stop: threading.Event, found: Found) -> None:
    names = list(bodies)
    number = first
    while not stop.is_set():
        name = names[number % len(names)]
        number += 5  # so that all kinds come early, in any number of seconds
        path, body, headers = bodies[name]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("POST", path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            outcome = str(answer.status)
            if answer.status >= 400:
                outcome += f" {json.loads(data)['error']['code']}"
        except (OSError, http.client.HTTPException) as error:
            outcome = type(error).__name__
        finally:
            connection.close()
        with found.lock:
            found.answers[f"{name}: {outcome}"] += 1


async def stream(port: int, request: bytes, until_s: float, found: Found) -> None:
    while time.monotonic() < until_s:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(request)
            last_s: float | None = None
            done = False
            async with asyncio.timeout(120):
                while not done and (data := await reader.read(1 << 16)):
                    now_s = time.monotonic()
                    found.events += data.count(b"data:")
                    if last_s is not None:
                        found.gap_s = max(found.gap_s, now_s - last_s)
                    last_s = now_s
                    done = b"[DONE]" in data
            writer.close()
            found.streams += 1
            if not done:
                found.broken.append("ended without [DONE]")
        except (OSError, TimeoutError) as error:
            found.broken.append(repr(error))


def children(pid: int) -> list[int]:
    """Processes that any thread of the process started."""
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for path in paths for word in path.read_text().split()]


def peak_rss_mb(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) * 1024 / MB if found else 0.0


def page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


def value(text: str, name: str) -> float:
    found = re.search(rf"^prfaas_gateway_{name} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def largest_lags(text: str) -> dict[str, float]:
    return {
        "all": value(text, "loop_lag_max_seconds"),
        "own": value(text, "loop_lag_own_max_seconds"),
    }


def lag_counts(text: str, name: str) -> dict[float, float]:
    pattern = rf'prfaas_gateway_{name}_bucket{{le="([^"]+)"}} (\S+)'
    return {float(bound) * 1e3: float(count) for bound, count in re.findall(pattern, text)}


def quantile_ms(before: dict[float, float], after: dict[float, float], share: float) -> float:
    probes = {bound: count - before.get(bound, 0.0) for bound, count in after.items()}
    total = max(probes.values())
    return min(bound for bound, count in probes.items() if count >= share * total)


def watch(port: int, pid: int, stop: threading.Event, found: Found) -> None:
    while not stop.wait(1.0):
        text = page(port)
        for part, largest_s in largest_lags(text).items():
            found.lag_max_s[part] = max(found.lag_max_s.get(part, 0.0), largest_s)
        measured = {"gateway": peak_rss_mb(pid), "bodies": value(text, "body_bytes") / MB}
        for number, child in enumerate(sorted(children(pid))):
            try:
                measured[f"worker {number}"] = peak_rss_mb(child)
            except OSError:  # it has just ended
                continue
        for name, mb in measured.items():
            found.peak_mb[name] = max(found.peak_mb.get(name, 0.0), round(mb, 1))


def lags(before: str, after: str, largest_s: dict[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part, name in (("all", "loop_lag_seconds"), ("own", "loop_lag_own_seconds")):
        counts = lag_counts(before, name), lag_counts(after, name)
        found[part] = {
            "p50_at_most": quantile_ms(*counts, 0.5),
            "p99_at_most": quantile_ms(*counts, 0.99),
            "largest": round(largest_s[part] * 1e3, 1),
        }
    return found


def run(seconds: float, clients: int, make: Callable[[], Any], folder: Path) -> dict[str, Any]:
    bodies = make()
    ports = free_ports(len(NODES))
    urls = {name: f"http://127.0.0.1:{at}" for name, at in zip(NODES, ports, strict=True)}
    pairs = [word for name, at in zip(NODES, ports, strict=True) for word in (str(at), name)]
    (port,) = free_ports(1)
    (folder / "tokenizer").mkdir()
    save_tokenizer(folder / "tokenizer", max_tokens=MAX_TOKENS)
    file = folder / "deployment.toml"
    text = DEPLOYMENT.format(model=MODEL, port=port, plans="true", **urls)
    text = text.replace(
        "max_bodies_mb = 4096", f'max_bodies_mb = {BODIES_MB}\ntokenizer = "tokenizer"'
    )
    file.write_text(text)
    with ExitStack() as stack:
        log = folder / "null"
        node = [
            *(sys.executable, str(HERE / "_null_node.py"), "--tokens", str(TOKENS)),
            *("--event-s", str(EVENT_S), *pairs),
        ]
        child = stack.enter_context(process(node, log))
        ready(ports[-1], child, log, None)
        log = folder / "gateway"
        command = [sys.executable, "-m", "prfaas", "gateway", str(file), "--log-level", "error"]
        child = stack.enter_context(process(command, log))
        request = requests_of(100)[0]
        ready(port, child, log, request)
        found = Found()
        stop = threading.Event()

        async def streams(until_s: float) -> None:
            await asyncio.gather(*(stream(port, request, until_s, found) for _ in range(STREAMS)))

        def streaming(duration_s: float) -> None:
            asyncio.run(streams(time.monotonic() + duration_s))

        first = page(port)
        streaming(5.0)
        quiet = page(port)
        before = lags(first, quiet, largest_lags(quiet))
        found.gap_s, quiet_gap_s = 0.0, found.gap_s
        threads = [
            threading.Thread(target=attack, args=(port, bodies, number, stop, found))
            for number in range(clients)
        ]
        threads.append(threading.Thread(target=watch, args=(port, child.pid, stop, found)))
        for thread in threads:
            thread.start()
        streaming(seconds)
        stop.set()
        for thread in threads:
            thread.join()
        after = page(port)
        during = lags(quiet, after, found.lag_max_s)
        died = child.poll()
        problems = log.read_text()[-2000:]
    worker_mb = memory_bound(64 * MB) / MB
    bounds = {"gateway": GATEWAY_MB, "bodies": BODIES_MB, "each worker": round(worker_mb)}
    peak = found.peak_mb
    memory_held = (
        peak.get("gateway", 0.0) < GATEWAY_MB
        and peak.get("bodies", 0.0) <= BODIES_MB
        and all(peak.get(f"worker {n}", 0.0) < worker_mb + 128 for n in range(WORKERS))
    )
    return {
        "seconds": seconds,
        "clients": clients,
        "cores": os.cpu_count(),
        "lag_ms": {"before": before, "during": during},
        "memory_mb": {"peak": peak, "bound": bounds},
        "streams": {
            "ended": found.streams,
            "events": found.events,
            "broken": len(found.broken),
            "largest_gap_ms": round(found.gap_s * 1e3, 1),
            "largest_gap_before_ms": round(quiet_gap_s * 1e3, 1),
            "problems": sorted(set(found.broken))[:5],
        },
        "answers": dict(sorted(found.answers.items())),
        "gateway_exit": died,
        "gateway_log": problems,
        "held": {
            "p99": during["all"]["p99_at_most"] <= P99_MS,
            "largest": during["all"]["largest"] < MAX_MS,
            "own_p99": during["own"]["p99_at_most"] <= P99_MS,
            "own_largest": during["own"]["largest"] < MAX_MS,
            "memory": memory_held,
            "streams": not found.broken and died is None,
        },
    }


@click.command(help=__doc__)
@click.option("--seconds", default=30.0, show_default=True, help="Seconds of the attack.")
@click.option("--clients", default=8, show_default=True, help="Hostile clients.")
@click.option("--size", default=SIZE, show_default=True, help="Bytes of the longest bodies.")
@click.option("--accepted", "serve", is_flag=True, help="Send long prompts that are served.")
def main(seconds: float, clients: int, size: int, serve: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        make = (lambda: accepted(10**6)) if serve else (lambda: hostile(size))
        results = run(seconds, clients, make, Path(name))
    print(json.dumps(results, indent=2))
    sys.exit(0 if all(results["held"].values()) else 1)


if __name__ == "__main__":
    main()
