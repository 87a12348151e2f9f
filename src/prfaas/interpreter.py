"""How prfaas starts a Python module in another process."""

from __future__ import annotations

import sys


def module_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module in this interpreter. `-P`: the current folder is not
    searched for modules. It may be a checkpoint's folder, and a file `json.py` in it would be
    run."""
    return [sys.executable, "-P", "-m", module, *arguments]
