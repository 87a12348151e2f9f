"""The keys of a deployment for fault injection: as many as a real deployment has.

Three ordinary tenants send the soak's traffic. A fourth tenant is hostile.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from prfaas.config import Deployment
from prfaas.config.gateway import ApiKey

ORDINARY_TENANTS = ("north", "south", "east")
HOSTILE_TENANT = "hostile"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Keys and the files that hold them."""

    folder: Path
    tenants: Mapping[str, str]  # the key of each tenant
    operator: str
    member: str

    @classmethod
    def create(cls, folder: Path) -> Credentials:
        """Makes new keys, and writes them into `folder`, which must exist."""
        tenants = {name: secrets.token_hex(32) for name in (*ORDINARY_TENANTS, HOSTILE_TENANT)}
        made = cls(folder, tenants, secrets.token_hex(32), secrets.token_hex(32))
        _write(made._file("operator"), made.operator)
        _write(made._file("member"), made.member)
        _write(made._file("metrics"), secrets.token_hex(32))
        _write(made._file("salt"), secrets.token_hex(32))
        for name, key in tenants.items():
            _write(made._file(f"tenant-{name}"), key)
        return made

    def _file(self, name: str) -> Path:
        return (self.folder / f"{name}.key").resolve()

    @property
    def member_options(self) -> list[str]:
        """Options of `prfaas kvd` and `prfaas node`."""
        return [
            *("--member-key-file", str(self._file("member"))),
            *("--metrics-key-file", str(self._file("metrics"))),
        ]

    def with_keys(self, deployment: Deployment) -> Deployment:
        """The deployment whose gateways require these keys."""
        section = msgspec.structs.replace(
            deployment.gateway,
            keys=[
                ApiKey(file=str(self._file(f"tenant-{name}")), tenant=name) for name in self.tenants
            ],
            operator_key_file=str(self._file("operator")),
            member_key_file=str(self._file("member")),
            metrics_key_file=str(self._file("metrics")),
            salt_file=str(self._file("salt")),
        )
        return msgspec.structs.replace(deployment, gateway=section)


def _write(file: Path, secret: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as opened:
        opened.write(f"{secret}\n")
