"""`prfaas bench`: runs a benchmark of this checkout; each prints JSON."""

from __future__ import annotations

import subprocess
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
    """Run a benchmark of this checkout: prfaas bench NAME [ARGUMENTS].

    Benchmarks live in bench/; without a NAME they are listed. Arguments go to the benchmark
    (prfaas bench NAME --help).
    """
    folder = Path.cwd() / "bench"
    names = sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_"))
    if not names:
        raise InputError(
            "no benchmarks here", where=str(folder), fix="run this from a checkout of the project"
        )
    if name is None or name in ("-h", "--help"):
        click.echo(f"benchmarks: {', '.join(names)}\nusage: prfaas bench NAME [ARGUMENTS]")
        return
    if name not in names:
        raise InputError(f"no benchmark {name!r}", fix=f"there are: {', '.join(names)}")
    done = subprocess.run([sys.executable, str(folder / f"{name}.py"), *arguments], check=False)
    sys.exit(done.returncode)
