"""`prfaas`: the command line. An error in the input is one line on stderr and exit code 2."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import ClassVar

import click

from prfaas import __version__
from prfaas.errors import CaseFailed, InputError

# A command is imported when it is called: `prfaas probe` does not wait for the import of scipy.
COMMANDS = {
    "demo": "Show the whole system in three minutes: plan, serve, cut the WAN, compare.",
    "up": "Start a whole deployment on this machine, with an emulated WAN.",
    "kv": "Show how much KV cache models produce, how fast, and the egress a cluster needs.",
    "plan": "Find the best threshold and split of a deployment and compare three baselines.",
    "advise": "Find the hardware for a model and its traffic; is PrfaaS worth it?",
    "simulate": "Simulate a deployment under a trace or random traffic.",
    "profile": "Measure prefill times and decode steps of a server, or estimate them.",
    "gateway": "Run the gateway: one OpenAI endpoint for all clusters of a deployment.",
    "drain": "Take a cluster out of use without a failed request, and back into use.",
    "trace": "Follow one request through gateway, nodes and kvds, and name what took long.",
    "node": "Serve a model with the built-in engine, with the HTTP API of a vLLM server.",
    "kvd": "Run the daemon that stores and transfers the KV cache of one host's engines.",
    "doctor": "Check a path that is to carry KV, or two engines that are to hand over.",
    "wan": "Relay a TCP port with the rate, delay, jitter and failures of a WAN.",
    "init": "Write the files of a deployment: host files, keys, certificates; print its commands.",
    "render": "Write Kubernetes manifests of a deployment, with keys and certificates.",
    "probe": "Ask a service whether it is alive or ready, as orchestrators do.",
    "model": "Make a small model with random weights; nothing is downloaded.",
}


class LazyGroup(click.Group):
    """Lists all commands and imports only the one that is called, from the module of its name."""

    package: ClassVar[str] = "prfaas.cli"
    summaries: ClassVar[Mapping[str, str]] = COMMANDS

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.summaries)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.summaries:
            return None
        command = getattr(importlib.import_module(f"{self.package}.{cmd_name}"), cmd_name)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self.summaries.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="prfaas")
def cli() -> None:
    """Prefill-as-a-Service: a remote cluster prefills long prompts and sends their KV cache back
    over Ethernet.

    \b
    Start here:
      prfaas demo                               see the whole system in three minutes
      prfaas up                                 serve a tiny model on this machine
      prfaas kv                                 how much KV cache do models produce, and how fast?
      prfaas plan configs/case_study.toml       is it worth it, and with which threshold and split?
      prfaas simulate configs/case_study.toml   what would happen to every request?
      prfaas init DIR                           files and commands for a deployment on many hosts
      prfaas doctor HOST:PORT                   can this path carry KV, and how fast?
      prfaas doctor pair A B                    can these two engines hand over, in which form?
    """


def main(program: click.Command = cli) -> None:
    try:
        program()
    except InputError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except CaseFailed as error:
        click.echo(error.text(), err=True)
        sys.exit(1)
    except BrokenPipeError:
        # The reader of the output (head, less) has exited. Without this line Python would print a
        # second error while it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        # Commands turn errors of reading into `InputError`, so this one is an error of writing.
        click.echo(f"error: cannot write the output: {error.strerror or error}", err=True)
        sys.exit(1)
