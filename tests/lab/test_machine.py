from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.errors import InputError
from prfaas_lab.machine import cpu_times


def test_the_busy_share_of_a_stretch_of_time(tmp_path: Path) -> None:
    file = tmp_path / "stat"
    #              user nice system idle iowait irq softirq steal guest guest_nice
    file.write_text("cpu  100 0 50 800 50 0 0 0 70 0\ncpu0 1 2 3 4 5 6 7 8 9 10\n")
    before = cpu_times(file)
    assert before == (150, 1000)
    file.write_text("cpu  130 0 60 840 60 0 0 10 90 0\n")
    assert cpu_times(file).share_since(before) == pytest.approx(0.5)
    assert before.share_since(before) == 0


def test_elsewhere_nobody_can_tell(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="how busy this machine is"):
        cpu_times(tmp_path / "stat")
