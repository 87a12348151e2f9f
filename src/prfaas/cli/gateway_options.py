"""The files that the gateway's section names: keys, certificates, the tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from prfaas.cli.shared_options import read_key
from prfaas.config import load_deployment
from prfaas.config.gateway import ApiKey, GatewaySection
from prfaas.config.tls import TlsSection
from prfaas.errors import InputError
from prfaas.gateway.api.credentials import GatewayCredentials, TenantKey
from prfaas.gateway.backend import BackendOptions
from prfaas.gateway.process import GatewayOptions
from prfaas.security.exposure import Protection, refuse_exposure
from prfaas.security.secret_file import read_secrets
from prfaas.security.tls import load_identity
from prfaas.text import load_tokenizer
from prfaas.types import ClusterId

_SALT_CHARACTERS = 32  # of the secret; 16 random bytes in hexadecimal


class SecurityFlags(NamedTuple):
    """The flags of `security_options`. Each wins over the deployment file."""

    member_key_file: str | None
    operator_key_file: str | None
    metrics_key_file: str | None
    tls_ca: str | None
    tls_cert: str | None
    tls_key: str | None
    insecure: bool


def load_options(
    file: Path,
    assignments: Sequence[str],
    section: GatewaySection,
    flags: SecurityFlags,
    cluster: ClusterId | None = None,
) -> GatewayOptions:
    """`cluster` is the pd cluster whose requests arrive at this gateway; None: those of all.

    Raises InputError when a file is wrong, or when other hosts could reach a gateway that does
    not protect itself."""
    folder = file.parent
    insecure = section.insecure or flags.insecure
    member = read_key(flags.member_key_file or _at(folder, section.member_key_file))
    if (flags.tls_ca, flags.tls_cert, flags.tls_key) != (None, None, None):
        given = TlsSection(flags.tls_ca, flags.tls_cert, flags.tls_key)
        tls = load_identity(given, "gateway.tls")
    else:
        tls = load_identity(section.tls, "gateway.tls", folder)

    def tenant_keys() -> list[TenantKey]:
        keys = load_deployment(file, assignments).gateway.keys
        return [found for key in keys for found in _tenant_keys(key, folder)]

    salt = None
    if section.salt_file is not None:
        (secret, *_) = read_secrets(folder / section.salt_file, min_characters=_SALT_CHARACTERS)
        salt = secret.encode()
    credentials = GatewayCredentials(
        tenant_keys,
        operator=read_key(flags.operator_key_file or _at(folder, section.operator_key_file)),
        metrics=read_key(flags.metrics_key_file or _at(folder, section.metrics_key_file)),
        member=member,
        salt_secret=salt,
        insecure=insecure,
        key_files=[file, *(folder / key.file for key in section.keys if key.file is not None)],
    )
    if section.console and credentials.locked and credentials.operator is None:
        raise InputError(
            "the console needs an operator key, with which operators log in",
            file=file,
            where="gateway.operator_key_file",
            fix="name a file with the key, or give --operator-key-file",
        )
    protection = Protection(credentials.locked, tls is not None, insecure)
    refuse_exposure(section.host, protection, where="--host", key_flag="[[gateway.keys]]")
    tokenizer = _at(folder, section.tokenizer or None)
    return GatewayOptions(
        tokenizer=load_tokenizer(tokenizer) if tokenizer is not None else None,
        tokenizer_folder=tokenizer,
        warm_worker=True,
        credentials=credentials,
        backend=BackendOptions(member_key=member, tls=tls, cluster=cluster),
        tls=tls,
    )


def _at(folder: Path, name: str | None) -> Path | None:
    return None if name is None else folder / name


def _tenant_keys(key: ApiKey, folder: Path) -> list[TenantKey]:
    secrets = (key.key,) if key.key is not None else read_secrets(folder / (key.file or ""))
    return [TenantKey(secret, key.tenant) for secret in secrets]
