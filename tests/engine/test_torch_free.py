from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import sys
import prfaas.cli.model, prfaas.cli.profile, prfaas.engine.emulated, prfaas.engine.profiling
print({"torch", "transformers"} & set(sys.modules))
"""


def test_emulation_and_profiling_do_not_import_torch() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "set()\n"), done.stderr
