from __future__ import annotations

import subprocess
import sys


def test_emulation_and_profiling_do_not_import_torch() -> None:
    script = (
        "import sys, prfaas.engine.emulated, prfaas.engine.profiling, prfaas.cli.profile, "
        "prfaas.cli.model; print([name for name in sys.modules if name in ('torch', 'transformers')])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stdout) == (0, "[]\n"), ended.stderr
