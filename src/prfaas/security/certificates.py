"""Makes a CA and the certificates of one deployment, for `security.tls`.

`CertificateAuthority` issues one certificate per host (`prfaas init`). `make_certificates` makes a
test set, in which all hosts share one server and one client certificate (`prfaas certs`). A host
with the CA's key can join the deployment.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from prfaas.errors import InputError
from prfaas.security.tls import SERVICE_NAME, TlsFiles, TlsIdentity

CA_DAYS = 3650  # hosts get new certificates of the same CA
ALWAYS_HOSTS = ("localhost", "127.0.0.1", "::1", SERVICE_NAME)
# Clocks of two datacenters differ; a certificate must not be refused for being too new.
_CLOCK_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class CertificateSet:
    """The files of one deployment, all in one folder."""

    folder: Path
    not_after: datetime.datetime

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    @property
    def ca_key(self) -> Path:
        return self.folder / "ca.key"

    @property
    def server(self) -> Path:
        return self.folder / "server.pem"

    @property
    def server_key(self) -> Path:
        return self.folder / "server.key"

    @property
    def client(self) -> Path:
        return self.folder / "client.pem"

    @property
    def client_key(self) -> Path:
        return self.folder / "client.key"

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.ca, self.ca_key, self.server, self.server_key, self.client, self.client_key)

    def identity(self) -> TlsIdentity:
        """Of one process that both listens and connects."""
        return TlsIdentity(
            TlsFiles(self.ca, self.server, self.server_key, self.client, self.client_key)
        )


@dataclass(frozen=True, slots=True)
class _Issued:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @property
    def pem(self) -> bytes:
        return self.certificate.public_bytes(serialization.Encoding.PEM)

    @property
    def key_pem(self) -> bytes:
        return _key_pem(self.key)


@dataclass(frozen=True, slots=True)
class IssuedCertificate:
    """A certificate and its private key, as PEM files hold them."""

    pem: bytes
    key_pem: bytes


class CertificateAuthority:
    """The CA of one deployment: it issues a certificate for each host."""

    def __init__(self, own: _Issued) -> None:
        self._own = own

    @classmethod
    def new(cls, now: datetime.datetime | None = None) -> CertificateAuthority:
        now = now or datetime.datetime.now(datetime.UTC)
        window = (now - _CLOCK_SKEW, now + datetime.timedelta(days=CA_DAYS))
        return cls(_authority(window, "prfaas CA"))

    @classmethod
    def parse(cls, pem: bytes, key_pem: bytes) -> CertificateAuthority:
        """The CA of an existing deployment. Raises InputError."""
        try:
            certificate = x509.load_pem_x509_certificate(pem)
            key = serialization.load_pem_private_key(key_pem, password=None)
        except (ValueError, TypeError):  # TypeError: the key has a passphrase
            raise InputError(
                "the CA's certificate or key is not a PEM file", fix="restore both files"
            ) from None
        if not isinstance(key, ec.EllipticCurvePrivateKey) or (
            key.public_key() != certificate.public_key()
        ):
            raise InputError(
                "the CA's key does not belong to its certificate", fix="restore both files"
            )
        return cls(_Issued(certificate, key))

    @property
    def pem(self) -> bytes:
        return self._own.pem

    @property
    def key_pem(self) -> bytes:
        return self._own.key_pem

    def issue(
        self,
        host: str,
        days: int,
        now: datetime.datetime | None = None,
        more: Sequence[str] = (),
    ) -> IssuedCertificate:
        """A certificate for a host as server and as client. Clients accept it for `host`, for its
        `more` names and for ALWAYS_HOSTS. It does not outlive the CA."""
        names = [_general_name(name) for name in dict.fromkeys((host, *more, *ALWAYS_HOSTS))]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return self._issue(f"prfaas {host}"[:64], usages, names, days, now)

    def issue_client(
        self, name: str, days: int, now: datetime.datetime | None = None
    ) -> IssuedCertificate:
        """A certificate for a client that is not a host, such as Prometheus. No client accepts it
        as that of a server."""
        return self._issue(f"prfaas {name}"[:64], [ExtendedKeyUsageOID.CLIENT_AUTH], [], days, now)

    def _issue(
        self,
        common_name: str,
        usages: Sequence[x509.ObjectIdentifier],
        names: list[x509.GeneralName],
        days: int,
        now: datetime.datetime | None,
    ) -> IssuedCertificate:
        now = now or datetime.datetime.now(datetime.UTC)
        wanted = now + datetime.timedelta(days=days)
        not_after = min(wanted, self._own.certificate.not_valid_after_utc)
        issued = _issue(self._own, common_name, usages, names, (now - _CLOCK_SKEW, not_after))
        return IssuedCertificate(issued.pem, issued.key_pem)


def certificate_carries(pem: bytes, names: Sequence[str]) -> bool:
    """Whether a certificate is for all of these hosts."""
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        kind = x509.SubjectAlternativeName
        found = certificate.extensions.get_extension_for_class(kind).value
    except (ValueError, x509.ExtensionNotFound):
        return not names
    return all(_general_name(name) in found for name in names)


def make_certificates(
    folder: Path,
    hosts: Sequence[str] = (),
    *,
    valid: datetime.timedelta = datetime.timedelta(days=365),
    now: datetime.datetime | None = None,
    force: bool = False,
) -> CertificateSet:
    """Writes a new CA, a server certificate for `hosts` (and ALWAYS_HOSTS) and a client
    certificate. Only the owner can read the keys. `force` replaces existing files, and then all of
    them, since a new CA invalidates the old certificates.
    """
    now = now or datetime.datetime.now(datetime.UTC)
    made = CertificateSet(folder, now + valid)
    names = [_general_name(host) for host in dict.fromkeys((*ALWAYS_HOSTS, *hosts))]
    present = [path.name for path in made.files if path.exists()]
    if present and not force:
        raise InputError(
            f"{', '.join(present)} exist already",
            file=folder,
            fix="use --force to replace the whole set, or another folder",
        )
    window = (now - _CLOCK_SKEW, made.not_after)
    ca = _authority(window, "prfaas test CA")
    server = _issue(ca, "prfaas server", [ExtendedKeyUsageOID.SERVER_AUTH], names, window)
    client = _issue(ca, "prfaas client", [ExtendedKeyUsageOID.CLIENT_AUTH], [], window)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for issued, cert_path, key_path in (
            (ca, made.ca, made.ca_key),
            (server, made.server, made.server_key),
            (client, made.client, made.client_key),
        ):
            _write(key_path, issued.key_pem, 0o600)
            _write(cert_path, issued.pem, 0o644)
    except OSError as error:
        raise InputError(f"cannot be written: {error.strerror}", file=folder) from None
    return made


def _authority(window: tuple[datetime.datetime, datetime.datetime], common_name: str) -> _Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(common_name)
    certificate = (
        _builder(name, name, key, window)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return _Issued(certificate, key)


def _issue(
    ca: _Issued,
    common_name: str,
    usages: Sequence[x509.ObjectIdentifier],
    names: list[x509.GeneralName],
    window: tuple[datetime.datetime, datetime.datetime],
) -> _Issued:
    key = ec.generate_private_key(ec.SECP256R1())
    authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(ca.key.public_key())
    builder = (
        _builder(_name(common_name), ca.certificate.subject, key, window)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(authority, critical=False)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return _Issued(builder.sign(ca.key, hashes.SHA256()), key)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    window: tuple[datetime.datetime, datetime.datetime],
) -> x509.CertificateBuilder:
    public = key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(window[0])
        .not_valid_after(window[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        if not host or any(c.isspace() or c in ":/" for c in host):
            raise ValueError
        return x509.DNSName(host)
    except ValueError:
        raise InputError(
            f"{host!r} is not a host name or IP address",
            where="--host",
            fix="give a name without port or scheme, in ASCII",
        ) from None


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def _write(path: Path, content: bytes, mode: int) -> None:
    # Write a new file under another name, then rename it. Other users can never read a key, even
    # when it replaces a file that they could read, and no reader sees a partial file.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
