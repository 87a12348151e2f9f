"""Engines that hand over in two forms: the canonical one of the other tests, and a native one with
other groups and pages. The blocks of both have equal hashes, so state of the wrong pool is seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prfaas.contracts.kvd_api import shapes_of
from prfaas.kvd.engine_socket.client import KvdClient
from prfaas.kvd.engine_socket.leases import ReadLease, WriteLease
from prfaas.kvd.engine_socket.messages import Register
from prfaas.kvspec import FullAttention, KVSpec, LinearState
from prfaas.types import Compat, Form, Grant
from tests.cache.builders import BLOCK
from tests.kvd.hosts import COMPAT, SPEC, Host, assert_holds, begun, fill, names

NATIVE_SPEC = KVSpec((FullAttention("kv", (0, 1, 2), 40), LinearState("state", (3,), 200)))
NATIVE = Compat("tiny", "1", "bf16", "f32", BLOCK, "vllm-NHD", 2)
COMPATS: dict[Form, Compat] = {"canonical": COMPAT, "native": NATIVE}
SPECS: dict[Form, KVSpec] = {"canonical": SPEC, "native": NATIVE_SPEC}
FORMS: tuple[Form, ...] = ("canonical", "native")


def register(form: Form, engine_id: str = "engine", compat: Compat | None = None) -> Register:
    shapes = shapes_of(SPECS[form])
    return Register(engine_id, shapes, BLOCK, compat or COMPATS[form], form == "native")


@dataclass(frozen=True)
class EngineOfTwoForms:
    """One process with a connection for each form."""

    canonical: KvdClient
    native: KvdClient

    def __getitem__(self, form: Form) -> KvdClient:
        return self.canonical if form == "canonical" else self.native


@contextmanager
def engine(host: Host, name: str = "engine") -> Iterator[EngineOfTwoForms]:
    with (
        host.engine(name) as canonical,
        host.engine(name, NATIVE_SPEC, compat=NATIVE, whole_blocks=True) as native,
    ):
        yield EngineOfTwoForms(canonical, native)


def write(
    engine: EngineOfTwoForms, form: Form, prompt: Sequence[int], grant: Grant | None = None
) -> None:
    """Computed, kept as a prefix, and sent when there is a grant."""
    lease = begun(engine[form].begin(names(prompt), len(prompt), grant=grant))
    fill(lease, prompt, spec=SPECS[form])
    lease.commit()


def assert_state(lease: ReadLease | WriteLease, form: Form, prompt: Sequence[int]) -> None:
    assert lease.tokens == len(prompt)
    assert_holds(lease, prompt, len(prompt), SPECS[form])
