"""Part `compare` of `bench/gpu.py`: `prfaas doctor pair --try` on many prompts, and on a state
with changed exponent bits."""

from __future__ import annotations

import asyncio
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _gpu_nodes import NodeProcess, NodeRack
from _gpu_options import GpuOptions
from prfaas.clock import MonotonicClock
from prfaas.errors import EngineError
from prfaas.launch.attached_process import attached_kvd
from prfaas.studies.pair_check import EnginePair
from prfaas.studies.single_handoff import HandoffReport, HandoffRequest, run_handoff
from prfaas_lab.testing.damage import DamageGate, HeadOfLayer

PROMPTS, SMALL_PROMPTS = 20, 4
SHORTEST, LONGEST = 200, 20_000
SMALL_SHORTEST, SMALL_LONGEST = 70, 400
# A changed state need not change the first token, so that answer is longer.
ANSWER_TOKENS, DAMAGED_ANSWER_TOKENS = 8, 24
HANDOFF_S = 120.0


def lengths(count: int, shortest: int, longest: int) -> list[int]:
    """Evenly spread by their logarithms; none of them is round."""
    ratio = (longest / shortest) ** (1 / max(1, count - 1))
    return [round(shortest * ratio**index) + index for index in range(count)]


def measure(options: GpuOptions, rack: NodeRack | None = None) -> dict[str, Any]:
    """EngineError when an undamaged hand-off changes an answer, and when a damaged one does not.

    The prefill node of the damaged hand-off is a third one, so that the two others have nothing
    between them and their kvds. It starts while the two others are compared."""
    own = rack is None
    rack = rack or NodeRack(options)
    try:
        prefill, decode = rack.nodes(2, options.end_s)
        with ExitStack() as stack:
            memory = "256MiB" if options.small else "2GiB"
            kvd = stack.enter_context(
                attached_kvd(("--memory", memory, "--log-level", "warning"), 0.0)
            )
            place = HeadOfLayer.of_model(rack.directory)
            # The path of a socket must be short, and the work folder's may be long.
            short = stack.enter_context(tempfile.TemporaryDirectory(prefix="prfaas-"))
            gate = DamageGate(Path(short) / "gate.sock", kvd.socket, place)
            stack.enter_context(gate)
            url = kvd.url or ""
            third = rack.start_another("damaged", ["--kvd", str(gate.path), "--kvd-url", url])
            stack.callback(third.end)
            results = _undamaged(options, rack, prefill, decode)
            third.wait_until_ready(options.left_s)
            results["damaged"] = _damaged(options, rack, third, decode, gate)
            options.keep("damaged", results["damaged"])
    finally:
        if own:
            rack.close()
    _check(results)
    return results


def _undamaged(
    options: GpuOptions, rack: NodeRack, prefill: NodeProcess, decode: NodeProcess
) -> dict[str, Any]:
    small = options.small
    chosen = (
        lengths(SMALL_PROMPTS, SMALL_SHORTEST, SMALL_LONGEST)
        if small
        else lengths(PROMPTS, SHORTEST, LONGEST)
    )
    found: list[dict[str, Any]] = []
    began_s = time.perf_counter()
    for number, tokens in enumerate(chosen):
        if options.left_s <= 0:
            break
        report = _hand_off(rack, prefill, decode, tokens, seed=3_000_000 + number)
        found.append(_as_dict(report))
        options.keep("handoffs", found)
    results = {
        "dtype": options.dtype,
        "answer_tokens": ANSWER_TOKENS,
        "prompts": len(chosen),
        "equal": sum(one["equal"] for one in found),
        "seconds": round(time.perf_counter() - began_s, 1),
        "handoffs": found,
    }
    options.keep("equal", results["equal"])
    return results


def _damaged(
    options: GpuOptions, rack: NodeRack, prefill: NodeProcess, decode: NodeProcess, gate: DamageGate
) -> dict[str, Any]:
    """The same length through the gate twice: unchanged, and with the bits changed."""
    tokens = SMALL_LONGEST if options.small else 4_001
    unchanged = _as_dict(_hand_off(rack, prefill, decode, tokens, 3_100_000, DAMAGED_ANSWER_TOKENS))
    gate.damaging = True
    changed = _as_dict(_hand_off(rack, prefill, decode, tokens, 3_100_001, DAMAGED_ANSWER_TOKENS))
    return {
        "layer": gate.place.layer,
        "head": gate.place.head,
        "changed_numbers": gate.damaged_numbers,
        "unchanged": unchanged,
        "changed": changed,
    }


def _hand_off(
    rack: NodeRack,
    prefill: NodeProcess,
    decode: NodeProcess,
    tokens: int,
    seed: int,
    answer_tokens: int = ANSWER_TOKENS,
) -> HandoffReport:
    pair = EnginePair(prefill.url, decode.url)
    request = HandoffRequest(rack.prompt(tokens, seed), answer_tokens, compare=True)

    async def bounded() -> HandoffReport:
        async with asyncio.timeout(HANDOFF_S):
            return await run_handoff(pair, request, MonotonicClock())

    return asyncio.run(bounded())


def _as_dict(report: HandoffReport) -> dict[str, Any]:
    assert report.comparison is not None, "it was requested"
    return {
        "prompt_tokens": report.prompt_tokens,
        "handoff_tokens": report.handoff_tokens,
        "distinct_tokens": len(set(report.answer or ())),
        "equal": report.comparison.same,
        "comparison": str(report.comparison),
    }


def _check(results: dict[str, Any]) -> None:
    found = results["handoffs"]
    if results["equal"] < len(found):
        unequal = [one["prompt_tokens"] for one in found if not one["equal"]]
        raise EngineError(f"hand-offs of {unequal} tokens changed the answer")
    if len(found) < results["prompts"]:
        raise EngineError(f"the time was used up after {len(found)} hand-offs")
    damaged = results["damaged"]
    if not damaged["unchanged"]["equal"]:
        raise EngineError("a hand-off through the gate changed the answer without any damage")
    if not damaged["changed_numbers"]:
        raise EngineError("the gate has changed no number")
    if damaged["changed"]["equal"]:
        raise EngineError("changed exponent bits of a state were not noticed")
