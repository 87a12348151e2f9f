"""The help of every command."""

from __future__ import annotations

from collections.abc import Iterator

import click

from prfaas.cli.main import cli
from tests.goldens.canonical import Golden
from tests.goldens.commands import prfaas, workplace


def goldens() -> Iterator[Golden]:
    with workplace():
        for words in _commands(cli, ()):
            name = "_".join(("prfaas", *words))
            yield Golden(f"{name}.txt", prfaas(*words, "--help").text)


def _commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    yield words
    if isinstance(command, click.Group):
        with click.Context(command) as context:
            for name in command.list_commands(context):
                inner = command.get_command(context, name)
                assert inner is not None
                yield from _commands(inner, (*words, name))
