"""Writes the folder of a new deployment, and adds hosts to it.

    DIR/ca.pem, ca.key           the CA; ca.key stays with the operator
    DIR/init.json                the answers, for --add-host
    DIR/hosts/HOST/              everything that one host needs
    DIR/client/                  for tenants: the CA, API keys
    DIR/operator/                for operators and Prometheus: the CA, a certificate, operator.key,
                                 metrics.key

Of the hosts, only the gateway's has the operator key.
Only the owner can read secrets and enter the folders.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from prfaas.config import Deployment
from prfaas.config.write import deployment_toml
from prfaas.errors import InputError
from prfaas.launch.new_deployment.answers import Answers, Instance, folder_name, with_host
from prfaas.launch.new_deployment.deployment_file import catalog_files, finish_deployment
from prfaas.launch.new_deployment.host_files import (
    CLIENT,
    OPERATOR,
    host_file,
    host_file_name,
    tenant_key_file,
)
from prfaas.launch.services.places import (
    CA,
    CERT,
    DEPLOYMENT,
    KEY,
    MEMBER_KEY,
    METRICS_KEY,
    OPERATOR_KEY,
    SALT,
)
from prfaas.security.certificates import CertificateAuthority, IssuedCertificate
from prfaas.security.secret_file import check_private

ANSWERS = "init.json"
_CA_KEY = "ca.key"
_KEY_BYTES = 32
_ALL_KEYS = (MEMBER_KEY, OPERATOR_KEY, METRICS_KEY)  # as `_SharedKeys` has them
_OPERATORS = (OPERATOR_KEY, METRICS_KEY)


class _SharedKeys(NamedTuple):
    """Keys of the deployment, as their files hold them."""

    member: bytes
    operator: bytes
    metrics: bytes


def write_deployment(folder: Path, answers: Answers, designed: Deployment, *, force: bool) -> None:
    """Writes the whole folder with new keys and certificates. Raises InputError, and writes
    nothing, when something exists there that must not be replaced."""
    check_replaceable(folder, force=force)
    folder = folder.resolve()
    authority = CertificateAuthority.new()
    shared = _SharedKeys(_new_key(), _new_key(), _new_key())
    tenants = {tenant_key_file(answers, tenant): _new_key() for tenant in answers.tenants}
    finished, copied = finish_deployment(designed, answers)
    catalogs = catalog_files(designed) if answers.engine == "emulated" else {}
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tree = FileTree(unfinished)
        tree.write(CA, authority.pem)
        tree.write(_CA_KEY, authority.key_pem, secret=True)
        tree.write(ANSWERS, _encode(answers))
        for host in answers.hosts:
            at = f"hosts/{folder_name(host)}"
            issued = authority.issue(host, answers.days)
            names = _keys_of(answers, host)
            _write_credentials(tree, at, authority, issued, shared, names)
            for instance in answers.instances:
                if instance.host == host:
                    _write_instance(tree, at, answers, instance, catalogs)
        gateway = f"hosts/{folder_name(answers.gateway)}"
        tree.write(f"{gateway}/{DEPLOYMENT}", deployment_toml(finished).encode())
        for name, source in copied.items():
            tree.write(f"{gateway}/{name}", source.read_bytes())
        tree.write(f"{gateway}/{SALT}", _new_key(), secret=True)
        for at in (gateway, CLIENT):
            for name, key in tenants.items():
                tree.write(f"{at}/{name}", key, secret=True)
        tree.write(f"{CLIENT}/{CA}", authority.pem)
        issued = authority.issue_client(OPERATOR, answers.days)
        _write_credentials(tree, OPERATOR, authority, issued, shared, _OPERATORS)
        _put_in_place(unfinished, folder)
    except OSError as error:
        raise InputError(
            f"cannot be written: {error.strerror}", file=error.filename or folder
        ) from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def add_host(folder: Path, cluster: str, host: str) -> tuple[Answers, Instance]:
    """Writes the files of one more instance: its host file, and a certificate of the deployment's
    CA where the host has none. The instance registers at the gateway. Raises InputError."""
    answers = read_answers(folder)
    changed, added = with_host(answers, cluster, host)
    at = f"hosts/{folder_name(host)}"
    gateway = folder / "hosts" / folder_name(answers.gateway)
    try:
        tree = FileTree(folder)
        if not (folder / at / CERT).exists():
            authority = read_authority(folder)
            found = [(gateway / name).read_bytes() for name in _ALL_KEYS]
            issued = authority.issue(host, answers.days)
            names = _keys_of(answers, host)
            _write_credentials(tree, at, authority, issued, _SharedKeys(*found), names)
        catalogs = {name: gateway / name for name in answers.catalogs}
        _write_instance(tree, at, changed, added, catalogs)
        tree.write(ANSWERS, _encode(changed))
    except OSError as error:
        raise _lost(error, folder) from None
    return changed, added


def renew_certificates(folder: Path) -> Answers:
    """Issues a new certificate of the deployment's CA for every host and for the operator. The keys
    stay as they are. Raises InputError."""
    answers = read_answers(folder)
    try:
        authority = read_authority(folder)
        tree = FileTree(folder)
        for host in answers.hosts:
            _write_pair(tree, f"hosts/{folder_name(host)}", authority.issue(host, answers.days))
        _write_pair(tree, OPERATOR, authority.issue_client(OPERATOR, answers.days))
    except OSError as error:
        raise _lost(error, folder) from None
    return answers


def read_authority(folder: Path) -> CertificateAuthority:
    check_private(folder / _CA_KEY)
    ca, key = (folder / CA).read_bytes(), (folder / _CA_KEY).read_bytes()
    try:
        return CertificateAuthority.parse(ca, key)
    except InputError as error:
        raise error.in_file(folder / _CA_KEY) from None


def _lost(error: OSError, folder: Path) -> InputError:
    return InputError(
        f"cannot be read or written: {error.strerror}",
        file=error.filename or folder,
        fix="restore the file that `prfaas init` wrote",
    )


def read_answers(folder: Path) -> Answers:
    file = folder / ANSWERS
    try:
        return msgspec.json.decode(file.read_bytes(), type=Answers)
    except FileNotFoundError:
        raise InputError(
            "this folder has no deployment", file=file, fix="make one first: prfaas init DIR ..."
        ) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=file) from None
    except msgspec.MsgspecError as error:
        raise InputError(f"is damaged: {error}", file=file, fix="restore the file") from None


def check_replaceable(folder: Path, *, force: bool) -> None:
    """Raises InputError when something exists there that must not be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / ANSWERS).is_file():
        # Another folder than that of a deployment is never replaced.
        raise InputError(
            "exists, and is not the folder of a deployment", file=folder, fix="name a new folder"
        )
    if not force:
        raise InputError(
            "has a deployment already",
            file=folder,
            fix="use --force to replace it with new keys and a new CA, --add-host to add a host, "
            "or another folder",
        )


def _put_in_place(made: Path, folder: Path) -> None:
    """Files in the folder that are not the deployment's stay there."""
    if not folder.exists():
        made.rename(folder)
        return
    folder.chmod(0o700)
    for part in made.iterdir():
        old = folder / part.name
        if old.is_dir() and not old.is_symlink():
            shutil.rmtree(old)
        part.rename(old)  # replaces a file


def _write_credentials(
    tree: FileTree,
    at: str,
    authority: CertificateAuthority,
    issued: IssuedCertificate,
    keys: _SharedKeys,
    names: Sequence[str],
) -> None:
    """`names`: files of the keys that this folder gets."""
    tree.write(f"{at}/{CA}", authority.pem)
    _write_pair(tree, at, issued)
    for name, key in zip(_ALL_KEYS, keys, strict=True):
        if name in names:
            tree.write(f"{at}/{name}", key, secret=True)


def _keys_of(answers: Answers, host: str) -> Sequence[str]:
    """Other hosts than the gateway's need not be trusted with orders."""
    return _ALL_KEYS if host == answers.gateway else (MEMBER_KEY, METRICS_KEY)


def _write_pair(tree: FileTree, at: str, issued: IssuedCertificate) -> None:
    tree.write(f"{at}/{KEY}", issued.key_pem, secret=True)
    tree.write(f"{at}/{CERT}", issued.pem)


def _write_instance(
    tree: FileTree, at: str, answers: Answers, instance: Instance, catalogs: Mapping[str, Path]
) -> None:
    tree.write(f"{at}/{host_file_name(instance)}", host_file(answers, instance).encode())
    for name, source in catalogs.items():
        tree.write(f"{at}/{name}", source.read_bytes())


def _encode(answers: Answers) -> bytes:
    return msgspec.json.format(msgspec.json.encode(answers)) + b"\n"


def _new_key() -> bytes:
    return f"{secrets.token_hex(_KEY_BYTES)}\n".encode()


class FileTree:
    """Files below one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, name: str, content: bytes, *, secret: bool = False) -> None:
        """Replaces a file. No reader sees a partial file."""
        mode = 0o600 if secret else 0o644
        path = self._root / name
        for folder in reversed(path.relative_to(self._root.parent).parents[:-1]):
            (self._root.parent / folder).mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
