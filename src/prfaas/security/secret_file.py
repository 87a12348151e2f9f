"""The one reader of secret files: tenant keys, the operator key, the member key, the salt secret.

Secrets are passed as files, because every user of the host can read a command line.
"""

from __future__ import annotations

from pathlib import Path

from prfaas.config.strict import read_text
from prfaas.errors import InputError

MAX_KEYS = 16  # in one file


def read_secrets(file: Path, *, min_characters: int = 1) -> tuple[str, ...]:
    """The file's lines, each without surrounding white space; empty lines are skipped. Raises
    InputError unless each line can be a bearer token in an HTTP header."""
    secrets = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    if not 1 <= len(secrets) <= MAX_KEYS or not all(
        len(secret) >= min_characters
        and secret.isascii()
        and secret.isprintable()
        # A space would end the token in the header.
        and " " not in secret
        for secret in secrets
    ):
        raise InputError(
            "does not hold a key",
            file=file,
            fix=f"write a line of at least {min_characters} printable ASCII characters without "
            f"spaces for each key, at most {MAX_KEYS} lines",
        )
    return tuple(dict.fromkeys(secrets))
