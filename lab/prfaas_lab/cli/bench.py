"""`python -m prfaas_lab bench`: runs a benchmark of this checkout. Every benchmark prints JSON."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from prfaas.errors import InputError


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(name: str | None, arguments: tuple[str, ...]) -> None:
    """Run a benchmark of this checkout: python -m prfaas_lab bench NAME [ARGUMENTS].

    The benchmarks are the scripts in bench/. Without a NAME the command lists them. It passes all
    ARGUMENTS to the benchmark: python -m prfaas_lab bench NAME --help shows what it accepts.
    """
    folder = Path.cwd() / "bench"
    names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    if not names:
        raise InputError(
            "the folder has no benchmarks",
            where=str(folder),
            fix="run this command in the top folder of a checkout",
        )
    if name is None or name in ("-h", "--help"):
        click.echo(
            f"benchmarks: {', '.join(names)}\n"
            "usage: python -m prfaas_lab bench NAME [ARGUMENTS]\n"
            "help on one benchmark: python -m prfaas_lab bench NAME --help"
        )
        return
    if name not in names:
        raise InputError(
            f"there is no benchmark {name!r}", fix=f"choose one of: {', '.join(names)}"
        )
    script = [sys.executable, str(folder / f"{name}.py"), *arguments]
    os.execv(sys.executable, script)  # so that signals reach the benchmark
