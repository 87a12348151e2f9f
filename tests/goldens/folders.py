"""Folders that commands write, as plain data: text, and of credentials only what they are for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from cryptography import x509

_SECRET = re.compile(r"[A-Za-z0-9_\-+/=]{32,}\s*")
# The lengths of random ids and of digests of random content.
_HEX = re.compile(r"\b[0-9a-f]{32,}\b")
# The Grafana dashboard: its source is in the repository as it is.
LEFT_OUT = ("dashboard.yaml",)


def described(folder: Path) -> dict[str, Any]:
    """Path -> mode and content of every file, or what a credential is."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            mode = f"{path.stat().st_mode & 0o777:o}"
            found[str(path.relative_to(folder))] = [mode, *_content(path)]
    return found


def _content(path: Path) -> list[Any]:
    if path.name in LEFT_OUT:
        return ["left out"]
    text = path.read_text(encoding="utf-8")
    if text.startswith("-----BEGIN CERTIFICATE-----"):
        return [line for one in x509.load_pem_x509_certificates(text.encode()) for line in _of(one)]
    if text.startswith("-----BEGIN"):
        return [text.splitlines()[0]]
    if path.suffix in (".key", ".token"):
        lines = text.splitlines()
        assert all(_SECRET.fullmatch(line) for line in lines), path
        return [f"a secret of {len(line)} characters" for line in lines]
    return _HEX.sub("(digest)", text).splitlines()


def _of(certificate: x509.Certificate) -> list[str]:
    lines = [f"certificate of {certificate.subject.rfc4514_string()}"]
    lines += [f"issued by {certificate.issuer.rfc4514_string()}"]
    days = (certificate.not_valid_after_utc - certificate.not_valid_before_utc).days
    lines += [f"valid for {days} days"]
    for extension in certificate.extensions:
        value = extension.value
        if isinstance(value, x509.SubjectAlternativeName):
            lines += [f"name {name.value}" for name in value]
        elif isinstance(value, x509.ExtendedKeyUsage):
            lines += [f"for {usage._name}" for usage in value]
        elif isinstance(value, x509.BasicConstraints):
            lines += [f"CA: {value.ca}"]
    return lines
