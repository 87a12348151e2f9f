from __future__ import annotations

from pathlib import Path

import pytest

from prfaas.config.link_trace import LinkSpeed, read_link_trace
from prfaas.errors import InputError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "link.csv"
    path.write_text(text)
    return path


def test_lines_with_and_without_a_link(tmp_path: Path) -> None:
    path = written(tmp_path, "at_s,gbps\n0, 100\n\n60,10,far,near\n120,0\n")
    assert read_link_trace(path) == [
        LinkSpeed(0.0, 100.0, None),
        LinkSpeed(60.0, 10.0, ("far", "near")),
        LinkSpeed(120.0, 0.0, None),
    ]


@pytest.mark.parametrize(
    ("text", "where"),
    [
        ("10,fast\n", "line 1"),
        ("10\n", "line 1"),
        ("10,5,far\n", "line 1"),
        ("0,5\n-1,5\n", "line 2"),
        ("0,5\n1,-5\n", "line 2"),
        ("0,5\n1,nan\n", "line 2"),
        ("5,5\n1,5\n", "line 2"),
        ("at_s,gbps\n", "no line"),
        ("", "no line"),
    ],
)
def test_mistakes_name_file_and_line(tmp_path: Path, text: str, where: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as caught:
        read_link_trace(path)
    assert where in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_file_is_said_as_such(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file"):
        read_link_trace(tmp_path / "absent.csv")
