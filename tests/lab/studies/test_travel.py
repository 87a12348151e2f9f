"""Studies of the laboratory on machines that have the product alone."""

from __future__ import annotations

import base64
import subprocess
import sys

from prfaas.studies.parallel.packed_case import pack, unpack
from prfaas_lab.studies.regional_day import RegionalDay
from prfaas_lab.studies.stress import STRESSES
from tests.waiting import PATIENCE_S

WITHOUT_THE_LABORATORY = """
import base64, sys
sys.modules["prfaas_lab"] = None  # an import of it fails
from prfaas.studies.parallel.packed_case import pack, unpack
stresses, day = unpack(base64.b64decode(sys.stdin.read()))
print(base64.b64encode(pack((sorted(stresses), day.trough, day))).decode())
"""


def test_studies_travel_to_a_machine_without_the_laboratory_and_back() -> None:
    day = RegionalDay({"east": -5.0}, trough=0.25, busiest_hour=14.0)
    done = subprocess.run(
        [sys.executable, "-P", "-c", WITHOUT_THE_LABORATORY],
        input=base64.b64encode(pack((STRESSES, day))).decode(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    names, trough, returned = unpack(base64.b64decode(done.stdout))
    assert (names, trough) == (sorted(STRESSES), day.trough)
    assert isinstance(returned, RegionalDay) and returned == day
