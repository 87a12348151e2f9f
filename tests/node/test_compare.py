"""`prfaas doctor pair --try` in bfloat16, between real processes: right about right hand-offs, and
about wrong ones.

Prompts are short, because a CPU without instructions for bfloat16 takes seconds for each.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from prfaas.clock import MonotonicClock
from prfaas.studies.handoff_comparison import AnswerComparison
from prfaas.studies.pair_check import EnginePair
from prfaas.studies.single_handoff import HandoffReport, HandoffRequest, run_handoff
from prfaas_lab.testing.damage import DamageGate, HeadOfLayer
from tests.node.hosts import START_S, Host, tokens_of

pytestmark = pytest.mark.timeout(10 * START_S)
_LOG = logging.getLogger(__name__)

CHUNK, BLOCK, NEW_TOKENS = 24, 16, 12
AWKWARD = [17 + 5 * at for at in range(20)]  # chunks end within blocks, blocks within chunks
BFLOAT16 = (
    *("--device", "cpu", "--set", "node.dtype=bfloat16"),
    *("--set", f"node.chunk_tokens={CHUNK}", "--set", f"node.block_tokens={BLOCK}"),
)


class GatedHost(Host):
    """A host whose engine reaches its kvd through a gate."""

    def __init__(self, folder: Path, options: Sequence[str], place: HeadOfLayer) -> None:
        self._place = place
        super().__init__(folder, options)

    def begin_node(self) -> None:
        kvd_socket = self._socket
        self.gate = DamageGate(Path(f"{kvd_socket}.gate"), kvd_socket, self._place)
        self._socket = str(self.gate.path)
        super().begin_node()
        self._socket = kvd_socket

    def close(self) -> None:
        super().close()
        self.gate.__exit__()


@dataclass(frozen=True, slots=True)
class ComparedPair:
    prefill: GatedHost
    decode: Host

    def hand_off(self, ids: list[int]) -> HandoffReport:
        pair = EnginePair(self.prefill.url, self.decode.url)
        request = HandoffRequest(ids, NEW_TOKENS, compare=True)
        return asyncio.run(run_handoff(pair, request, MonotonicClock()))

    def uncut(self, ids: list[int]) -> list[int]:
        """The prefill node's answer with its own cuts only."""
        params = {"do_reference": True}
        return tokens_of(
            self.prefill.complete(ids, max_tokens=NEW_TOKENS, kv_transfer_params=params)
        )


@contextmanager
def compared_pair(model: Path, folder: Path) -> Iterator[ComparedPair]:
    options = ("--model", str(model), *BFLOAT16)
    with ExitStack() as stack:
        prefill = GatedHost(folder / "p", options, HeadOfLayer.of_model(model))
        stack.callback(prefill.close)
        decode = Host(folder / "d", options)
        stack.callback(decode.close)
        for host in (prefill, decode):
            host.wait_until_ready()
        yield ComparedPair(prefill, decode)


def prompt(tokens: int) -> list[int]:
    chance = np.random.default_rng(AWKWARD.index(tokens))
    return [int(token) for token in chance.integers(32, 127, tokens)]


def compared(report: HandoffReport) -> AnswerComparison:
    assert report.comparison is not None and report.comparison.rule == "same_cuts"
    cuts = report.comparison.cut_tokens
    assert cuts is not None and report.handoff_tokens in cuts and cuts[-1] == report.prompt_tokens
    return report.comparison


def check_damage(pair: ComparedPair, lengths: Sequence[int]) -> None:
    """Changed exponents of one head's state of one layer are found."""
    gate = pair.prefill.gate
    gate.damaging = True
    try:
        found = [compared(pair.hand_off(prompt(tokens))) for tokens in lengths]
    finally:
        gate.damaging = False
    assert gate.damaged_segments and gate.damaged_numbers
    assert not all(one.same for one in found), gate.damaged_segments


@pytest.mark.grid
def test_a_right_hand_off_passes_and_a_damaged_state_fails(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    with compared_pair(checkpoint("kimi-linear"), tmp_path) as pair:
        found = compared(pair.hand_off(prompt(17)))
        assert found.same, str(found)
        assert not pair.prefill.gate.damaged_segments
        check_damage(pair, [32])


@pytest.mark.grid
@pytest.mark.parametrize("arch", ["kimi-linear", "qwen3", "mimo"])
def test_twenty_awkward_lengths_pass(
    checkpoint: Callable[[str], Path], tmp_path: Path, arch: str
) -> None:
    """States of a delta net, full attention only, and windows. How many answers differ without the
    cuts depends on the CPU's kernels: where matrix products do not depend on the number of rows, it
    is at least 2 of the delta net's 20 (17 and 32 tokens) and none of the others'."""
    uncut_differ = 0
    with compared_pair(checkpoint(arch), tmp_path) as pair:
        for tokens in AWKWARD:
            report = pair.hand_off(prompt(tokens))
            found = compared(report)
            assert found.same, f"{tokens} tokens: {found}"
            uncut_differ += pair.uncut(prompt(tokens)) != report.answer
            _LOG.info("%d tokens, cut at %s: %d differ", tokens, found.cut_tokens, uncut_differ)
        check_damage(pair, AWKWARD[:3])
    _LOG.info("%s: %d of %d answers differ without the cuts", arch, uncut_differ, len(AWKWARD))
