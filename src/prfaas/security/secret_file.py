"""The one reader of secret files: keys of tenants and members, operator key, metrics key, salt.

Secrets are passed as files, because every user of the host can read a command line. A file that
every user can read is no better, so it is refused.
"""

from __future__ import annotations

import stat
from pathlib import Path

from prfaas.config.strict import read_text
from prfaas.errors import InputError

MAX_KEYS = 16  # in one file
_OF_OTHERS = stat.S_IROTH | stat.S_IWOTH


def check_private(file: Path) -> None:
    """Raises InputError where users other than the owner and the group may read or write a file
    with a secret. Orchestrators give a file to its pod by way of the group. What is not a plain
    file, such as a pipe of a shell, has no lasting content. Whether the file exists is for its
    reader."""
    try:
        mode = file.stat().st_mode
    except OSError:
        return
    if stat.S_ISREG(mode) and mode & _OF_OTHERS:
        raise InputError(
            f"holds a secret, and its mode {stat.S_IMODE(mode):04o} lets every user read or change "
            "it",
            file=file,
            fix=f"run `chmod o-rwx {file}`, and replace the secret if others use this host",
        )


def read_secrets(file: Path, *, min_characters: int = 1) -> tuple[str, ...]:
    """The file's lines, each without surrounding white space; empty lines are skipped. Raises
    InputError unless each line can be a bearer token in an HTTP header, and where other users may
    read the file."""
    check_private(file)
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
