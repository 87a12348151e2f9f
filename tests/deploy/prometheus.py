"""Debian's package `prometheus`: promtool, and a Prometheus that scrapes processes of a test."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
SCRAPES = ROOT / "deploy" / "prometheus" / "prometheus.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "prfaas.json"

needs_prometheus = pytest.mark.skipif(
    shutil.which("promtool") is None or shutil.which("prometheus") is None,
    reason="promtool or prometheus was not found; on Debian: apt-get install prometheus",
)
START_S = 60.0
_CALL_S = 30.0


def promtool(*arguments: str | Path, page: str | None = None) -> tuple[int, str]:
    """The exit code, and all that promtool prints."""
    done = subprocess.run(
        ["promtool", *map(str, arguments)],
        input=page,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
        check=False,
    )
    return done.returncode, done.stdout


def complaints_about(page: str) -> list[str]:
    """What promtool has against an exposition. vLLM's names have a colon, which is meant for
    recording rules; nothing else is excused."""
    code, printed = promtool("check", "metrics", page=page)
    excused = re.compile(r"^vllm:\w+ metric names should not contain ':'$")
    found = [line for line in printed.splitlines() if line and not excused.match(line)]
    return found if code in (0, 3) else [f"promtool ended with code {code}", *found]


def families_of(page: str) -> dict[str, str]:
    """The help texts of an exposition, by the names of its families."""
    return dict(re.findall(r"^# HELP (\S+) (.*)$", page, re.MULTILINE))


class Value(NamedTuple):
    labels: Mapping[str, str]
    value: float


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self._http = http

    async def query(self, expression: str) -> list[Value]:
        found = await self._get("query", {"query": expression})
        return [Value(one["metric"], float(one["value"][1])) for one in found["result"]]

    async def query_range(
        self, expression: str, start: float, end: float, step_s: float
    ) -> list[list[float]]:
        """The values of each series, without those that are not a number."""
        span = {"query": expression, "start": start, "end": end, "step": step_s}
        found = await self._get("query_range", span)
        series = [[float(value) for _, value in one["values"]] for one in found["result"]]
        return [[value for value in values if value == value] for values in series]

    async def firing(self) -> dict[str, list[dict[str, Any]]]:
        """The alerts that fire, by name."""
        found: dict[str, list[dict[str, Any]]] = {}
        for alert in (await self._get("alerts", {}))["alerts"]:
            if alert["state"] == "firing":
                found.setdefault(alert["labels"]["alertname"], []).append(alert)
        return found

    async def rules(self) -> list[dict[str, Any]]:
        groups = (await self._get("rules", {}))["groups"]
        return [rule for group in groups for rule in group["rules"]]

    async def _get(self, path: str, parameters: Mapping[str, Any]) -> Any:
        async with self._http.get(f"{self.url}/api/v1/{path}", params=parameters) as answer:
            told = await answer.json()
        assert told["status"] == "success", told
        return told["data"]


@asynccontextmanager
async def running_prometheus(folder: Path, config: Mapping[str, Any]) -> AsyncIterator[Prometheus]:
    """`config`: as its file has it. JSON is YAML."""
    file, port = _prepare(folder, config)
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=warn",
            stdout=log,
            stderr=log,
        )
    try:
        timeout = aiohttp.ClientTimeout(total=_CALL_S)
        async with aiohttp.ClientSession(timeout=timeout) as http:
            url = f"http://127.0.0.1:{port}"
            await _until_ready(http, url, process)
            yield Prometheus(url, http)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def _prepare(folder: Path, config: Mapping[str, Any]) -> tuple[Path, int]:
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))
    with socket.create_server(("127.0.0.1", 0)) as held:
        return file, int(held.getsockname()[1])


async def _until_ready(
    http: aiohttp.ClientSession, url: str, process: asyncio.subprocess.Process
) -> None:
    async with asyncio.timeout(START_S):
        while True:
            assert process.returncode is None, "it has ended; see prometheus.log"
            try:
                async with http.get(f"{url}/-/ready") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)


_DURATION = re.compile(r"\[(\d+)([smh])\]")
_FOR = re.compile(r"^(\s+for: )(\d+)([smh])", re.MULTILINE)


def quick_rules(text: str, range_s: int, for_s: int) -> str:
    """The rules with short times: all of a test's faults happen within minutes."""
    return _FOR.sub(rf"\g<1>{for_s}s", _DURATION.sub(f"[{range_s}s]", text))


def dashboard_queries(dashboard: Mapping[str, Any], range_s: int) -> list[tuple[str, str]]:
    """Each panel's title with one of its queries, without Grafana's variables."""
    return [
        (
            f"{panel['title']} {target['refId']}",
            target["expr"].replace("$__rate_interval", f"{range_s}s").replace("$deployment", ".*"),
        )
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
    ]


def scrape_jobs(targets: Mapping[str, Sequence[str]], key_file: Path) -> list[dict[str, Any]]:
    """Jobs of the scrape configuration: by name, the addresses."""
    return [
        {
            "job_name": name,
            "authorization": {"credentials_file": str(key_file)},
            "static_configs": [{"targets": list(addresses), "labels": {"deployment": "test"}}],
        }
        for name, addresses in targets.items()
    ]
