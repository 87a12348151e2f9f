"""Says in one line why this Python cannot make the virtual environment. Old Pythons run it too."""

import importlib.util
import sys

ANOTHER = "or name another Python, for example: make PYTHON=python3.12 setup"

if sys.version_info < (3, 11):  # noqa: UP036 - here it may be an older one
    sys.exit(
        f"prfaas needs Python 3.11 or newer, and {sys.executable} is "
        f"{sys.version_info[0]}.{sys.version_info[1]}: install a newer one, {ANOTHER}"
    )
for module in ("venv", "ensurepip"):
    if importlib.util.find_spec(module) is None:
        sys.exit(
            f"{sys.executable} lacks the module {module}, which virtual environments need: "
            f"install it (Debian and Ubuntu: apt install python3-venv), {ANOTHER}"
        )
