"""`prfaas plan` of the deployments in `configs` with several PD clusters."""

from __future__ import annotations

from collections.abc import Iterator

from tests.goldens import plans
from tests.goldens.canonical import Golden
from tests.goldens.commands import workplace

PRECISION = plans.PRECISION


def goldens() -> Iterator[Golden]:
    with workplace():
        for name in plans.SEVERAL_HOMES:
            yield from plans.reports(f"configs/{name}.toml")
