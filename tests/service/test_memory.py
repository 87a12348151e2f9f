from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.service.memory import commits_strictly, memory_limit

HOST = "MemTotal:        1000 kB\nMemFree: 10 kB\nSwapTotal:  24 kB\n"


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": "4096\n"}, 4096),
        ("0::/a\n", {"a/memory.max": "max\n"}, 1 << 20),
        ("0::/only/on/the/host\n", {"memory.max": "8192\n"}, 8192),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "5000\n"}, 5000),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, 1 << 20),
        ("nonsense\n", {}, 1 << 20),
    ],
)
def test_the_smallest_limit_counts(
    tmp_path: Path, own: str, files: dict[str, str], limit: int
) -> None:
    for name, text in {"own": own, "host": HOST, **files}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    assert memory_limit(tmp_path, tmp_path / "own", tmp_path / "host") == limit


def test_nothing_that_can_be_read(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert memory_limit(none, none, none) is None and not commits_strictly(none)
    strict = tmp_path / "strict"
    strict.write_text("2\n")
    assert commits_strictly(strict)
