"""Every fault strikes a deployment of real processes with requests under way. Requests whose answer
has not begun end with the tokens of one process; answers that have begun end with an error event;
nothing is left behind; the PrfaaS node prefills long prompts again without help."""

from __future__ import annotations

import pytest

from prfaas_lab.faults.catalogue import FAULTS, fault
from prfaas_lab.faults.episode import FaultResult
from tests.complaints import check_output
from tests.faults.conftest import EACH, FaultSetup, sockets

# With a real model's tokens, and its imports at each start, those that lose or damage state.
WITH_TORCH = ("prefill-killed-sending", "decode-killed-waiting", "decode-kvd-killed", "wan-damage")
# Another part hangs or slows down in the same way, or other tests kill it.
IN_GRID = ("decode-kvd-hangs", "decode-worker-hangs", "gateway-killed", "wan-slow")
# Connections that are pooled, those that other kvds send over (three kvds, four connections each;
# a kvd and its worker have two sockets for each of them), and those of requests that others make
# meanwhile.
SLACK_SOCKETS = 36


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(one.name, marks=pytest.mark.grid if one.name in IN_GRID else ())
        for one in FAULTS
    ],
)
def test_emulated(
    emulated_setup: FaultSetup, seen: dict[str, list[FaultResult]], name: str
) -> None:
    found = struck(emulated_setup, name)
    seen.setdefault("emulated", []).append(found)
    if name == "disk-full":
        assert "SSD tier: write failed" in logs(emulated_setup, "kvd-*")


@pytest.mark.grid
# The first of these starts four engines with torch and measures the model: two minutes on two cores
# that others use, five at a load of ten.
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", WITH_TORCH)
def test_with_a_real_model(
    hf_setup: FaultSetup, seen: dict[str, list[FaultResult]], name: str
) -> None:
    seen.setdefault("Kimi-Linear", []).append(struck(hf_setup, name))


def struck(setup: FaultSetup, name: str) -> FaultResult:
    found = setup.run(setup.campaign.run(fault(name)))
    assert found.unexcused == [] and sum(found.verdicts.values()) == 2 * EACH
    check_sockets(setup)
    told = logs(setup, "*")
    assert "Traceback" not in told and "internal_error" not in told
    check_output(told)
    return found


def check_sockets(setup: FaultSetup) -> None:
    """Of all faults so far together: a process that leaks a little at each will be found."""
    now = setup.run(sockets(setup.deployment))
    assert now.keys() == setup.at_first.keys(), "as many processes as there were"
    grown = {
        name: (setup.at_first[name], now[name])
        for name in now
        if now[name] > setup.at_first[name] + SLACK_SOCKETS
    }
    assert not grown, "sockets at first, and now"


def logs(setup: FaultSetup, pattern: str) -> str:
    return "\n".join(path.read_text() for path in setup.folder.glob(f"{pattern}.log"))
