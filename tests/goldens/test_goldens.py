"""The goldens hold: the code makes what is recorded.

A change of what users see fails here. If the change is meant, the command in the message records
it anew, and the diff of the recorded files is part of the commit.
"""

from __future__ import annotations

import importlib
import pkgutil

import msgspec
import pytest

from prfaas import contracts
from tests.goldens.areas import AREAS, COMMAND, RECORDED, check
from tests.goldens.messages import recorded_kinds


@pytest.mark.parametrize("area", AREAS)
def test_what_users_see_is_as_recorded(area: str) -> None:
    problems = check(area)
    assert not problems, "\n".join(
        [
            f"{len(problems)} of the recorded files of {area} differ.",
            *problems,
            f"If the change is meant, run `{COMMAND} {area}` and explain the change in the commit.",
        ]
    )


def test_every_recorded_file_belongs_to_an_area() -> None:
    assert {path.name for path in RECORDED.iterdir()} == set(AREAS)


def test_every_message_of_the_contracts_is_recorded() -> None:
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.iter_modules(contracts.__path__, f"{contracts.__name__}.")
    ]
    messages = {
        name
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, type)
        and issubclass(value, msgspec.Struct)
        and value.__module__ == module.__name__
    }
    assert messages <= recorded_kinds(), "add them to tests/goldens/messages.py"
