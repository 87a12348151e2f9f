"""The forms in which a process of the engine hands over, each with its connection to the kvd."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from prfaas.errors import InputError
from prfaas.integrations.vllm.caches.forms import EngineForm
from prfaas.integrations.vllm.caches.groups import CacheLayout
from prfaas.integrations.vllm.settings import ConnectorSettings
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.types import Form


@dataclass(frozen=True, slots=True)
class FormAccess:
    form: Form
    kvd: KvdClient
    layout: CacheLayout


class FormAccesses:
    """At least one. The first is the engine's format for routing."""

    def __init__(self, accesses: Sequence[FormAccess]) -> None:
        self._by_form = {access.form: access for access in accesses}
        self.first = accesses[0]

    def __iter__(self) -> Iterator[FormAccess]:
        return iter(self._by_form.values())

    def find(self, form: Form | None) -> FormAccess:
        """The access of the form that a grant names; the first one when it names none. InputError
        when this engine does not have it."""
        found = self.first if form is None else self._by_form.get(form)
        if found is None:
            raise InputError(
                f"this engine does not hand over in the {form} form",
                where="kv_transfer_params: form",
                fix=f"use: {', '.join(self._by_form)}",
            )
        return found

    def close(self) -> None:
        for access in self:
            access.kvd.close()


def connect(
    forms: Sequence[EngineForm],
    settings: ConnectorSettings,
    engine_id: str,
    *,
    keeps_answers: bool = False,
) -> FormAccesses:
    """Registers the forms with the kvd. The first one must be accepted; see `KvdClient` for the
    others."""
    accesses: list[FormAccess] = []
    with ExitStack() as on_failure:
        for form in forms:
            kvd = KvdClient(
                settings.kvd,
                engine_id=engine_id,
                spec=form.layout.spec,
                block_tokens=form.layout.block_tokens,
                compat=form.compat,
                whole_blocks=form.layout.whole > 1,
                url=settings.url,
                further=bool(accesses),
                keeps_answers=keeps_answers,
            )
            on_failure.callback(kvd.close)
            accesses.append(FormAccess(form.compat.form, kvd, form.layout))
        on_failure.pop_all()
    return FormAccesses(accesses)
