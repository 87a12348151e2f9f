"""Files with keys, as an operator's are: nobody else may read them."""

from __future__ import annotations

from pathlib import Path


def write_secret(file: Path, content: str | bytes) -> None:
    file.touch()
    file.chmod(0o600)
    file.write_bytes(content.encode() if isinstance(content, str) else content)
