"""`prfaas`: the command line. Errors a person can mend are one line on stderr and exit code 2."""

from __future__ import annotations

import os
import sys

import click

from prfaas import __version__
from prfaas.cli.bench import bench
from prfaas.cli.certs import certs
from prfaas.cli.doctor import doctor
from prfaas.cli.kv import kv
from prfaas.cli.plan import plan
from prfaas.cli.wan import wan
from prfaas.errors import InputError


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="prfaas")
def cli() -> None:
    """Prefill-as-a-Service: long prefills on a remote cluster, their KV cache back over Ethernet.

    \b
    Start here:
      prfaas kv                             how much KV do these models produce, and how fast?
      prfaas plan configs/case_study.toml   is it worth it, with which threshold and split?
    """


cli.add_command(kv)
cli.add_command(plan)
cli.add_command(bench)
cli.add_command(certs)
cli.add_command(wan)
cli.add_command(doctor)


def main() -> None:
    try:
        cli()
    except InputError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except BrokenPipeError:
        # The reader (head, less) went away. Python would complain once more while closing stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        # Reading is checked where files are named; what is left is output that cannot be written.
        click.echo(f"error: cannot write the output: {error.strerror or error}", err=True)
        sys.exit(1)
