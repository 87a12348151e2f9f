from __future__ import annotations

import subprocess
import sys

from tests.waiting import PATIENCE_S

SCRIPT = """
import sys
import prfaas.cli.model, prfaas.cli.profile, prfaas.engine.emulated
print({"torch", "transformers"} & set(sys.modules))
"""


def test_emulation_and_profiling_do_not_import_torch() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
