"""Runs the command line in this process, in a scratch folder with the configurations.

The commands see relative paths only, a terminal of a fixed width and no settings of the user's, so
that their output is the same in every folder and on every machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from prfaas import __version__
from prfaas.cli.main import main

ROOT = Path(__file__).parents[2]
# Programs read these to find out about their terminal.
_TERMINAL = {"COLUMNS": "100", "LINES": "50", "TERM": "dumb", "NO_COLOR": "1"}
_UNWANTED = ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "CLICOLOR", "CLICOLOR_FORCE")
MEASURED = "(measured)"
_MEASURED_KEYS = frozenset({"wall_s", "cpu_s"})
_PAGE_DATA = re.compile(r'<script type="application/json"[^>]*>(.*?)</script>', re.DOTALL)


class Output(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        assert self.code == 0, self.err
        return masked(json.loads(self.out))

    @property
    def text(self) -> str:
        """What is printed by a command that succeeds."""
        assert self.code == 0, self.err
        return self.out + self.err

    @property
    def failure(self) -> str:
        return f"exit code {self.code}\n{self.out}{self.err}"


@contextmanager
def workplace() -> Iterator[Path]:
    """The current folder is a scratch folder that has `configs`."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory(prefix="prfaas-goldens-") as folder:
        place = Path(folder).resolve()
        shutil.copytree(ROOT / "configs", place / "configs")
        os.chdir(place)
        mask = os.umask(0o022)  # the modes of files that commands write are recorded
        try:
            yield place
        finally:
            os.umask(mask)
            os.chdir(before)


def prfaas(*words: object) -> Output:
    """Runs `prfaas WORDS`."""
    out, err = io.StringIO(), io.StringIO()
    environment = {k: v for k, v in os.environ.items() if k not in _UNWANTED} | _TERMINAL
    code: object = 0
    with (
        mock.patch.dict(os.environ, environment, clear=True),
        mock.patch.object(sys, "argv", ["prfaas", *map(str, words)]),
        # As the installed program, whose name click shows, and not as `python -m`.
        mock.patch.object(sys.modules["__main__"], "__package__", None),
        mock.patch.object(sys, "stdin", io.StringIO()),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code or 0
    assert isinstance(code, int), code
    return Output(code, masked_text(out.getvalue()), masked_text(err.getvalue()))


def masked_text(text: str) -> str:
    """Without the scratch folder and the version."""
    for folder in {str(Path.cwd()), str(Path.cwd().resolve())}:
        text = text.replace(f"{folder}/", "").replace(folder, ".")
    return text.replace(f"prfaas {__version__}", "prfaas VERSION")


def masked(value: Any) -> Any:
    """Plain data without the measured durations."""
    if isinstance(value, dict):
        return {k: MEASURED if k in _MEASURED_KEYS else masked(v) for k, v in value.items()}
    return [masked(inner) for inner in value] if isinstance(value, list) else value


def page_data(page: Path) -> Any:
    """The data of a page that `--html` has written."""
    found = _PAGE_DATA.search(page.read_text(encoding="utf-8"))
    assert found is not None, "the page has data"
    return masked(json.loads(masked_text(found[1])))
