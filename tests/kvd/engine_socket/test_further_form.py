"""An engine's second form: registered after the first one, also after a restart of the kvd."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from prfaas.errors import PrfaasError
from tests.kvd.hosts import COMPAT, begun, kvd, names, prompt_of
from tests.waiting import wait_until

NATIVE = msgspec.structs.replace(COMPAT, layout="vllm 0.32 cpu blocks abc")


def test_a_second_form_waits_for_the_first(tmp_path: Path) -> None:
    with kvd(tmp_path) as host, host.engine("e", compat=NATIVE, further=True) as further:
        assert not further.connected
        with pytest.raises(PrfaasError, match="has not registered its first form yet"):
            further.pin(names(prompt_of(8)))
        assert host.stats()["pool"] is None
        with host.engine("e"):
            wait_until(lambda: further.connected)
            begun(further.pin(names(prompt_of(8)))).release()
            stats = host.stats()
            assert stats["pool"]["compat"]["layout"] == "canonical"
            assert [pool["compat"]["layout"] for pool in stats["more_pools"]] == [NATIVE.layout]
            assert [engine["processes"] for engine in stats["engines"]] == [1]


def test_a_second_form_that_the_kvd_refuses_costs_only_that_form(tmp_path: Path) -> None:
    upgraded = msgspec.structs.replace(NATIVE, layout="vllm 0.33 cpu blocks def")
    with kvd(tmp_path) as host, host.engine("e") as first:
        with host.engine("e", compat=NATIVE, further=True) as before:
            assert before.connected
        with host.engine("e", compat=upgraded, further=True) as further:
            assert first.connected and not further.connected
            with pytest.raises(PrfaasError, match="layout: .* here, .* there"):
                further.pin(names(prompt_of(8)))
            begun(first.pin(names(prompt_of(8)))).release()
