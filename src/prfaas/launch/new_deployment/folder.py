"""Writes the folder of a new deployment, and adds hosts to it.

    DIR/ca.pem, ca.key           the CA; ca.key stays with the operator
    DIR/init.json                the answers, for --add-host
    DIR/hosts/HOST/              everything that one host needs
    DIR/client/                  for people: the CA, a tenant key, the operator key

Only the owner can read secrets and enter the folders.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec

from prfaas.config import Deployment
from prfaas.config.write import deployment_toml
from prfaas.errors import InputError
from prfaas.launch.new_deployment.answers import Answers, Instance, folder_name, with_host
from prfaas.launch.new_deployment.deployment_file import catalog_files, finish_deployment
from prfaas.launch.new_deployment.host_files import (
    CA,
    CERT,
    DEPLOYMENT,
    KEY,
    MEMBER_KEY,
    OPERATOR_KEY,
    SALT,
    host_file,
    host_file_name,
    tenant_key_file,
)
from prfaas.security.certificates import CertificateAuthority

ANSWERS = "init.json"
_CA_KEY = "ca.key"
_KEY_BYTES = 32
_PUBLIC, _SECRET = 0o644, 0o600


def write_deployment(folder: Path, answers: Answers, designed: Deployment, *, force: bool) -> None:
    """Writes the whole folder with new keys and certificates. Raises InputError, and writes
    nothing, when something exists there that must not be replaced."""
    _check_replaceable(folder, force=force)
    folder = folder.resolve()
    authority = CertificateAuthority.new()
    member, operator, salt = _new_key(), _new_key(), _new_key()
    tenants = {tenant_key_file(answers, tenant): _new_key() for tenant in answers.tenants}
    finished, copied = finish_deployment(designed, answers)
    catalogs = catalog_files(designed) if answers.engine == "emulated" else {}
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        tree = _Tree(unfinished)
        tree.write(CA, authority.pem, _PUBLIC)
        tree.write(_CA_KEY, authority.key_pem, _SECRET)
        tree.write(ANSWERS, msgspec.json.format(msgspec.json.encode(answers)) + b"\n", _PUBLIC)
        for host in answers.hosts:
            at = f"hosts/{folder_name(host)}"
            _write_credentials(tree, at, host, authority, member, answers.days)
            for instance in answers.instances:
                if instance.host == host:
                    _write_instance(tree, at, answers, instance, catalogs)
        gateway = f"hosts/{folder_name(answers.gateway)}"
        tree.write(f"{gateway}/{DEPLOYMENT}", deployment_toml(finished).encode(), _PUBLIC)
        for name, source in copied.items():
            tree.write(f"{gateway}/{name}", source.read_bytes(), _PUBLIC)
        tree.write(f"{gateway}/{SALT}", salt, _SECRET)
        tree.write("client/" + CA, authority.pem, _PUBLIC)
        for at in (gateway, "client"):
            tree.write(f"{at}/{OPERATOR_KEY}", operator, _SECRET)
            for name, key in tenants.items():
                tree.write(f"{at}/{name}", key, _SECRET)
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
    old = f"hosts/{folder_name(answers.hosts[0])}"
    try:
        ca, key = (folder / CA).read_bytes(), (folder / _CA_KEY).read_bytes()
        member = (folder / old / MEMBER_KEY).read_bytes()
        tree = _Tree(folder)
        if not (folder / at / CERT).exists():
            try:
                authority = CertificateAuthority.parse(ca, key)
            except InputError as error:
                raise error.in_file(folder / _CA_KEY) from None
            _write_credentials(tree, at, host, authority, member, answers.days)
        gateway = folder / "hosts" / folder_name(answers.gateway)
        catalogs = {name: gateway / name for name in answers.catalogs}
        _write_instance(tree, at, changed, added, catalogs)
        tree.write(ANSWERS, msgspec.json.format(msgspec.json.encode(changed)) + b"\n", _PUBLIC)
    except OSError as error:
        raise InputError(
            f"cannot be read or written: {error.strerror}",
            file=error.filename or folder,
            fix="restore the file of `prfaas init`",
        ) from None
    return changed, added


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


def _check_replaceable(folder: Path, *, force: bool) -> None:
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
    tree: _Tree, at: str, host: str, authority: CertificateAuthority, member: bytes, days: int
) -> None:
    issued = authority.issue(host, days)
    tree.write(f"{at}/{CA}", authority.pem, _PUBLIC)
    tree.write(f"{at}/{CERT}", issued.pem, _PUBLIC)
    tree.write(f"{at}/{KEY}", issued.key_pem, _SECRET)
    tree.write(f"{at}/{MEMBER_KEY}", member, _SECRET)


def _write_instance(
    tree: _Tree, at: str, answers: Answers, instance: Instance, catalogs: Mapping[str, Path]
) -> None:
    tree.write(f"{at}/{host_file_name(instance)}", host_file(answers, instance).encode(), _PUBLIC)
    for name, source in catalogs.items():
        tree.write(f"{at}/{name}", source.read_bytes(), _PUBLIC)


def _new_key() -> bytes:
    return f"{secrets.token_hex(_KEY_BYTES)}\n".encode()


class _Tree:
    """Files below one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def write(self, name: str, content: bytes, mode: int) -> None:
        """Replaces a file. No reader sees a partial file."""
        path = self._root / name
        for folder in reversed(path.relative_to(self._root.parent).parents[:-1]):
            (self._root.parent / folder).mkdir(mode=0o700, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
