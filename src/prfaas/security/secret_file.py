"""The one reader of secret files: API keys, the gateway's key, the deployment key.

Secrets are passed as files, because every user of the host can read a command line.
"""

from __future__ import annotations

from pathlib import Path

from prfaas.config.strict import read_text
from prfaas.errors import InputError


def read_secret(file: Path, *, min_characters: int = 1) -> str:
    """The file's only line, without surrounding white space. Raises InputError unless an HTTP
    header can carry it as a bearer token."""
    secret = read_text(file).strip()
    fits_header = secret.isascii() and secret.isprintable() and " " not in secret
    if len(secret) < min_characters or not fits_header:
        raise InputError(
            "does not hold a key",
            file=file,
            fix=f"write one line of at least {min_characters} printable ASCII characters, "
            "without spaces",
        )
    return secret
