"""The keys and certificates of a deployment on Kubernetes, kept beside its manifests.

    DIR/ca.pem, ca.key          the CA; ca.key stays with the operator
    DIR/keys/                   member.key, operator.key, metrics.key, salt.key, a key for each
                                tenant
    DIR/client/, operator/      what clients and operators need outside of the clusters
    DIR/CLUSTER/overlay/secrets/SECRET/     what the pods of a cluster get

A second run keeps what exists. Only the owner can read the files.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from prfaas.errors import InputError
from prfaas.launch.kubernetes import gateways, members, monitoring
from prfaas.launch.kubernetes.options import RenderOptions, RotationStep
from prfaas.launch.kubernetes.pod_places import MEMBERS_SERVICE, NAMESPACE
from prfaas.launch.kubernetes.rendering import Rendered, tenant_file
from prfaas.launch.new_deployment.folder import FileTree, read_authority
from prfaas.launch.new_deployment.host_files import CLIENT, OPERATOR
from prfaas.launch.services.places import (
    CA,
    CERT,
    KEY,
    MEMBER_KEY,
    METRICS_KEY,
    OPERATOR_KEY,
    SALT,
)
from prfaas.security.certificates import (
    CertificateAuthority,
    IssuedCertificate,
    certificate_carries,
)
from prfaas.security.secret_file import read_secrets

CA_KEY = "ca.key"
KEYS = "keys"
_ROTATED = (MEMBER_KEY, OPERATOR_KEY, METRICS_KEY)
_STEP_FILE = "rotation"  # beside the keys: the latest step that was taken
_KEY_BYTES = 32
_DOMAIN = "svc.cluster.local"


def write_credentials(
    folder: Path, rendered: Mapping[str, Rendered], options: RenderOptions, *, renew: bool
) -> None:
    """Writes the secrets of every cluster; makes the CA, keys and certificates that are missing,
    and with `renew` all certificates again. Raises InputError."""
    tree = FileTree(folder)
    authority = _authority(folder, tree)
    keys = _keys(folder, tree, options.tenants)
    for cluster, made in rendered.items():
        for secret in made.secrets:
            at = f"{cluster}/overlay/secrets/{secret}"
            if renew or not _is_usable(folder / at, secret, cluster, options):
                _write_pair(tree, at, _issue(authority, secret, cluster, options))
            for name in made.secrets[secret]:
                if name == CA:
                    tree.write(f"{at}/{name}", authority.pem, secret=True)
                elif name == monitoring.TOKEN:
                    # Without a line end, which a header cannot have.
                    first = keys[METRICS_KEY].split()[0]
                    tree.write(f"{at}/{name}", first, secret=True)
                elif name in keys:
                    tree.write(f"{at}/{name}", keys[name], secret=True)
    _write_for_people(tree, authority, keys, options)
    if renew or not (folder / OPERATOR / CERT).is_file():
        _write_pair(tree, OPERATOR, authority.issue_client(OPERATOR, options.days))


def _is_usable(folder: Path, secret: str, cluster: str, options: RenderOptions) -> bool:
    """Whether a pair is there, with all names that it needs now."""
    cert = folder / CERT
    if not (cert.is_file() and (folder / KEY).is_file()):
        return False
    is_client = secret == monitoring.SECRET
    names = [] if is_client else certificate_names(secret, cluster, options)
    return certificate_carries(cert.read_bytes(), names)


def _issue(
    authority: CertificateAuthority, secret: str, cluster: str, options: RenderOptions
) -> IssuedCertificate:
    if secret == monitoring.SECRET:
        return authority.issue_client("prometheus", options.days)
    first, *others = certificate_names(secret, cluster, options)
    return authority.issue(first, options.days, more=others)


def certificate_names(secret: str, cluster: str, options: RenderOptions) -> list[str]:
    """Of the pods of a cluster, or of its gateway. Every certificate also carries the name of the
    service, which members check: their addresses change."""
    if secret == members.SECRET:
        return [f"*.{cluster}.{NAMESPACE}.{_DOMAIN}", f"*.{cluster}"]
    assert secret == gateways.SECRET, secret
    services = ("gateway", MEMBERS_SERVICE)
    inside = [
        f"{service}{rest}"
        for service in services
        for rest in (f".{NAMESPACE}.{_DOMAIN}", f".{NAMESPACE}.svc", f".{NAMESPACE}", "")
    ]
    outside = [options.gateway_addresses[cluster].host]
    return [*outside, *options.certificate_names.get(cluster, ()), *inside]


def _authority(folder: Path, tree: FileTree) -> CertificateAuthority:
    if (folder / CA_KEY).is_file():
        return read_authority(folder)
    if (folder / CA).is_file():
        raise InputError("the folder has ca.pem and not ca.key", file=folder, fix="restore ca.key")
    authority = CertificateAuthority.new()
    tree.write(CA, authority.pem)
    tree.write(CA_KEY, authority.key_pem, secret=True)
    return authority


def _keys(folder: Path, tree: FileTree, tenants: Iterable[str]) -> dict[str, bytes]:
    names = [MEMBER_KEY, OPERATOR_KEY, METRICS_KEY, SALT, *map(tenant_file, tenants)]
    found = {}
    for name in names:
        file = folder / KEYS / name
        if not file.is_file():
            tree.write(f"{KEYS}/{name}", _key_lines([_new_key()]), secret=True)
        read_secrets(file)
        found[name] = file.read_bytes()
    return found


def _write_for_people(
    tree: FileTree,
    authority: CertificateAuthority,
    keys: Mapping[str, bytes],
    options: RenderOptions,
) -> None:
    """What clients and operators need outside of the clusters."""
    tree.write(f"{CLIENT}/{CA}", authority.pem)
    for tenant in options.tenants:
        tree.write(f"{CLIENT}/{tenant_file(tenant)}", keys[tenant_file(tenant)], secret=True)
    tree.write(f"{OPERATOR}/{CA}", authority.pem)
    for name in (OPERATOR_KEY, METRICS_KEY):
        tree.write(f"{OPERATOR}/{name}", keys[name], secret=True)


def _write_pair(tree: FileTree, at: str, issued: IssuedCertificate) -> None:
    tree.write(f"{at}/{KEY}", issued.key_pem, secret=True)
    tree.write(f"{at}/{CERT}", issued.pem, secret=True)


# Rotation -----------------------------------------------------------------------------------------


def rotate_keys(folder: Path, step: RotationStep) -> None:
    """One of the three steps of docs/security.md, for all keys but those of tenants and the salt.
    Raises InputError when the steps are not taken in their order: a step that is taken twice would
    bring the old key back."""
    tree = FileTree(folder)
    for name in _ROTATED:
        file = folder / KEYS / name
        if not file.is_file():
            raise InputError("no such file", file=file, fix="render the deployment first")
    note = folder / KEYS / _STEP_FILE
    _check_order(note.read_text().strip() if note.is_file() else "", step)
    for name in _ROTATED:
        lines = rotated(read_secrets(folder / KEYS / name), step)
        tree.write(f"{KEYS}/{name}", _key_lines(lines), secret=True)
    tree.write(f"{KEYS}/{_STEP_FILE}", f"{step}\n".encode(), secret=True)


def _check_order(taken: str, step: RotationStep) -> None:
    """`taken`: the latest step; empty before the first rotation."""
    following: dict[str, RotationStep] = {"add": "use", "use": "remove"}
    expected = following.get(taken, "add")
    if step != expected:
        since = f"after {taken!r}" if taken else "at first"
        raise InputError(
            f"the step {step!r} does not follow: {since} comes {expected!r}",
            where="--rotate-keys",
            fix="take the steps add, use and remove in this order, and apply the manifests after "
            "each",
        )


def rotated(lines: Sequence[str], step: RotationStep) -> list[str]:
    """The lines of a key file after a step. The first line is sent, every line is accepted."""
    if step == "add":
        return [*lines, _new_key()]
    if step == "use":
        return [lines[-1], *lines[:-1]]
    return [lines[0]]


def _new_key() -> str:
    return secrets.token_hex(_KEY_BYTES)


def _key_lines(keys: Sequence[str]) -> bytes:
    return "".join(f"{key}\n" for key in keys).encode()
