"""`bench/serve.py` as a process, against a server over real HTTP."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.measure.servers import DONE, event, serving, stream, token

SCRIPT = Path(__file__).parents[2] / "bench" / "serve.py"


async def answer(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": 2}
    return await stream(request, token(1), token(2), event(choices=[], usage=usage), DONE)


async def bench(*arguments: str) -> tuple[int, str, str]:
    async with serving(answer) as url:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, str(SCRIPT), "--url", url, *arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()


async def test_random_arrivals() -> None:
    code, out, _ = await bench("--load", "500", "--lengths", "fixed:700", "--requests", "30")
    found = json.loads(out)
    assert code == 0 and found["completed"] == 30 and found["errors"] == {}
    assert found["prompt_tokens"] == 30 * 700 and found["ttft_s"]["p50"] > 0


async def test_a_trace(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 0, "input_length": 1000, "output_length": 3, "hash_ids": [1, 2]},
        {"timestamp": 1, "input_length": 600, "output_length": 3, "hash_ids": [1, 9]},
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    code, out, _ = await bench("--trace", str(path), "--speedup", "100")
    assert code == 0 and json.loads(out)["prompt_tokens"] == 1600


async def test_mistakes_are_one_line() -> None:
    for arguments, message in (
        (["--load", "1"], "exactly one of --lengths and --workload"),
        ([], "exactly one of --trace and --load"),
    ):
        code, _, err = await bench(*arguments)
        assert code == 2 and message in err and err.count("\n") == 1
