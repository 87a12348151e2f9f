"""Runs the command line as a user does, in this process."""

from __future__ import annotations

import json
import sys
from typing import Any, NamedTuple

import click
import pytest

from prfaas.cli.main import cli, main


class Result(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *arguments: object,
    program: click.Command = cli,
) -> Result:
    monkeypatch.setattr(sys, "argv", ["prfaas", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main(program)
    captured = capsys.readouterr()
    return Result(int(ended.value.code or 0), captured.out, captured.err)
