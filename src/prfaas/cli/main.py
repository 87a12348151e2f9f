"""`prfaas`: the command line. Errors a person can mend are one line on stderr and exit code 2."""

from __future__ import annotations

import importlib
import os
import sys

import click

from prfaas import __version__
from prfaas.errors import InputError

# Commands are imported when they are called: nobody waits for scipy to see a certificate made.
COMMANDS = {
    "kv": "KV size, prefill time and KV throughput of models; egress of a cluster.",
    "plan": "Is it worth it? Best threshold and split, beside three baselines.",
    "demo": "Plan, serve, cut the WAN, compare: under three minutes.",
    "model": "Make a small model that needs no download.",
    "profile": "Measure a model here: prefill, KV size, decode steps.",
    "simulate": "What would a policy have done with this traffic on this deployment?",
    "up": "Start a whole deployment on this machine, with a WAN made of software.",
    "soak": "Serve while a fault strikes every few seconds; account for every request.",
    "gateway": "One OpenAI endpoint over the clusters of a deployment.",
    "node": "Serve a model as vLLM would, attached to a kvd; prefills and decodes.",
    "handoff": "Hand one request from a prefill to a decode node, step by step.",
    "kvd": "Keep and move KV: one per host, beside its engines.",
    "doctor": "Is the path to a receiver fit for KV? What is to be mended?",
    "wan": "Impose a WAN on a TCP link: rate, delay, jitter, stalls, outages, cuts.",
    "certs": "Make a test CA and certificates for mutual TLS.",
    "bench": "Run a benchmark of this checkout.",
}


class LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = getattr(importlib.import_module(f"prfaas.cli.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="prfaas")
def cli() -> None:
    """Prefill-as-a-Service: long prefills on a remote cluster, their KV cache back over Ethernet.

    \b
    Start here:
      prfaas demo                               show me, in three minutes
      prfaas up                                 serve it on this machine
      prfaas kv                                 how much KV do these models produce, how fast?
      prfaas plan configs/case_study.toml       is it worth it, with which threshold and split?
      prfaas simulate configs/case_study.toml   what would happen to every request?
      prfaas doctor HOST:PORT                   can KV travel this way, and how fast?
    """


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
