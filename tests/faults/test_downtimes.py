from __future__ import annotations

import pytest

from prfaas_lab.faults.downtimes import Downtimes, is_excused
from prfaas_lab.faults.questions import Verdict


def test_a_request_overlaps_with_a_downtime() -> None:
    down = Downtimes()
    down.begin("east-0", 10.0)
    assert down.include("east-0", 0.0, 10.0), "it had not ended when the node was killed"
    assert not down.include("east-0", 0.0, 9.0), "it ended before"
    assert down.include("east-0", 50.0, 60.0), "the node is still down"
    down.end("east-0", 20.0)
    assert down.include("east-0", 15.0, 16.0) and down.include("east-0", 0.0, 99.0)
    assert not down.include("east-0", 21.0, 99.0), "it came after the node was back"
    assert not down.include("east-1", 0.0, 99.0)


def test_a_process_may_be_down_several_times() -> None:
    down = Downtimes()
    for begun_s in (0.0, 10.0):
        down.begin("gateway-east", begun_s)
        down.end("gateway-east", begun_s + 1)
    down.end("gateway-east", 30.0)  # it was not down
    assert down.include("gateway-east", 0.5, 0.6) and down.include("gateway-east", 10.5, 10.6)
    assert not down.include("gateway-east", 2.0, 9.0) and not down.include("gateway-east", 12.0, 40)


EXCUSED_BY = {
    Verdict.LOST: {"gateway"},
    Verdict.BROKEN: {"node"},
    Verdict.REFUSED: {"gateway", "node"},
    Verdict.WRONG: set[str](),
}


@pytest.mark.parametrize("verdict", Verdict)
def test_only_a_lost_gateway_or_decode_node_excuses_a_failure(verdict: Verdict) -> None:
    fine = verdict in (Verdict.RIGHT, Verdict.LEFT)
    assert is_excused(verdict, gateway_was_down=False, decode_node_was_down=False) == fine
    by_gateway = is_excused(verdict, gateway_was_down=True, decode_node_was_down=False)
    by_node = is_excused(verdict, gateway_was_down=False, decode_node_was_down=True)
    wanted = {"gateway", "node"} if fine else EXCUSED_BY[verdict]
    assert {"gateway"} & wanted == ({"gateway"} if by_gateway else set())
    assert {"node"} & wanted == ({"node"} if by_node else set())
